"""README and docs/: links that lead somewhere, and messages that the program really prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")])
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def _links(page: Path) -> list[str]:
    return _LINK.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))


def _anchors(page: Path) -> set[str]:
    """The names that a heading can be linked by, as code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_each_relative_link_resolves(page: Path) -> None:
    """A link within the project leads to a file that is there, and to a heading that it has."""
    broken = []
    for link in _links(page):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert broken == []


def test_readme_leads_to_every_page() -> None:
    """Whoever reads README finds each page of docs/, from there or from a page that it names."""
    found, left = {ROOT / "README.md"}, [ROOT / "README.md"]
    while left:
        page = left.pop()
        for link in _links(page):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target.exists() and target not in found:
                found.add(target)
                left.append(target)
    assert set((ROOT / "docs").glob("*.md")) - found == set()


def test_troubleshooting_quotes_what_is_printed() -> None:
    """docs/troubleshooting.md goes by symptom: the messages it quotes are those of the program."""
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `([^`]+)`.*\|.*\|$", text, re.MULTILINE)
    assert len(quoted) >= 10
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "moe_proxy").rglob("*.py"))
    # A message that goes on in the next line of the source is one message.
    source = re.sub(r'"\s*\n\s*f?"', "", source)
    for message in quoted:
        pattern = r"[^\n]*".join(re.escape(part) for part in message.split("…"))
        assert re.search(pattern, source), message
