"""Owns how much of the held-out text stands in the training text too: what its perplexity is worth.

A document is held out as a whole, but what fills the same template with other numbers is hardly new text.
It reads the corpus as ``corpus.py`` does, and writes ``overlap.json``.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
from collections.abc import Iterator
from pathlib import Path

SHORTEST = 20
"""Characters from which a line counts: shorter ones are brackets and headings that any text has."""
_NUMBER = re.compile(r"\d[\d.,]*")


def lines(path: Path) -> Iterator[str]:
    """Lines of a corpus file that are long enough to count, without the space around them."""
    with lzma.open(path, "rt", encoding="utf-8") as text:
        yield from (line for line in map(str.strip, text) if len(line) >= SHORTEST)


def masked(line: str) -> str:
    """The line with every number replaced by the same sign."""
    return _NUMBER.sub("#", line)


def overlap(train: Iterator[str], held: list[str]) -> dict[str, float]:
    """Shares of the characters of ``held`` whose line stands in ``train``: as it is, and but for numbers."""
    exact, template = set(held), {masked(line) for line in held}
    same, alike = set(), set()
    for line in train:
        if line in exact:
            same.add(line)
        if (shape := masked(line)) in template:
            alike.add(shape)
    size = sum(map(len, held))
    return {
        "same": sum(len(line) for line in held if line in same) / size,
        "but_for_numbers": sum(len(line) for line in held if masked(line) in alike) / size,
    }


def main() -> None:
    """Compare the two files of each domain."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--corpus", type=Path, required=True, help="folder with *.train.txt.xz, *.held.txt.xz"
    )
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    result = {}
    for path in sorted(arguments.corpus.glob("*.held.txt.xz")):
        domain = path.name.partition(".")[0]
        result[domain] = overlap(lines(path.with_name(f"{domain}.train.txt.xz")), list(lines(path)))
        print(domain, result[domain], flush=True)
    (arguments.output / "overlap.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
