"""Owns how a file is written so that no reader ever sees half of it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary name beside ``path``; on success it replaces ``path``, on failure it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    # Made here, so that the file gets the mode that the user's umask asks for.
    temporary.touch(exist_ok=False)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8; readers see the old content or the new one."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
