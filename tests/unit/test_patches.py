"""The edits to llama.cpp: call sites, nothing else."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from moe_proxy.engine.tree import apply_patch, read_series

ROOT = Path(__file__).parents[2]
PATCHES = ROOT / "patches"
NAMES = sorted(path.name for path in PATCHES.glob("*.patch"))
MAX_ADDED_LINES = 24
# A kernel is changed where it stands: lines are replaced, and each of its forms is launched in two variants.
KERNELS = "0007-cuda-read-experts-through-the-page-table.patch"
MAX_KERNEL_LINES = 48
REPLACED = {KERNELS: 13, "0008-cuda-stage-experts-and-tell-when-a-stream-is-idle.patch": 2}


def _header_and_diff(name: str) -> tuple[str, list[str]]:
    text = (PATCHES / name).read_text(encoding="utf-8")
    header, mark, diff = text.partition("\n--- a/")
    assert mark, f"{name} holds no diff"
    return header, (mark + diff).lstrip("\n").splitlines()


def _files(name: str) -> list[str]:
    _, diff = _header_and_diff(name)
    return [line.removeprefix("--- a/") for line in diff if line.startswith("--- ")]


def test_the_series_names_every_patch_once_and_in_order() -> None:
    """No patch is in no series, and the series names none twice and none that is not there."""
    assert [path.name for path in read_series(PATCHES)] == NAMES
    assert {path.name for path in PATCHES.iterdir()} == {*NAMES, "series"}


@pytest.mark.parametrize("name", NAMES)
def test_a_patch_states_why_it_cannot_live_outside(name: str) -> None:
    """Patches are named NNNN-*.patch, say what they do, and why it cannot live outside of llama.cpp."""
    header, _ = _header_and_diff(name)
    assert re.fullmatch(r"\d{4}-[a-z0-9-]+\.patch", name)
    assert re.match(r"[A-Z][^\n]+\.\n", header), "the first line is a sentence"
    assert len(header.partition("Why it cannot live outside: ")[2]) > 80


@pytest.mark.parametrize("name", NAMES)
def test_a_patch_holds_call_sites_only(name: str) -> None:
    """A patch adds a few lines, makes no file, and takes none away but to change it: logic is in native/."""
    _, diff = _header_and_diff(name)
    added = [line for line in diff if line.startswith("+") and not line.startswith("+++ ")]
    assert 0 < len(added) <= (MAX_KERNEL_LINES if name == KERNELS else MAX_ADDED_LINES)
    taken = [line for line in diff if line.startswith("-") and not line.startswith("--- a/")]
    assert len(taken) == REPLACED.get(name, 0)
    assert [line for line in diff if line.startswith("+++ ")] == [f"+++ b/{file}" for file in _files(name)]


def test_the_series_applies_without_fuzz(llama_source: Path, tmp_path: Path) -> None:
    """The series applies to the pinned source with every line of context as it is there."""
    for file in sorted({file for name in NAMES for file in _files(name)}):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(llama_source / file, tmp_path / file)
    for patch in read_series(PATCHES):
        apply_patch(patch, tmp_path)
    called = "\n".join(path.read_text(encoding="utf-8") for path in tmp_path.rglob("*") if path.is_file())
    headers = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "native/include").iterdir()}
    declared = set(re.findall(r"\b(moe_pager_\w+)\(", headers.pop("moe-pager.h")))
    called += "\n".join(headers.values())  # what the patches include calls on their behalf
    assert set(re.findall(r"\b(moe_pager_\w+)\(", called)) - {"moe_pager_route"} == declared
