"""Owns how a file is written so that no reader ever sees half of it."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary name beside ``path``; on success it replaces ``path``, on failure it is removed.

    Raises OSError that names ``path``, not the temporary file.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}") if path.name else path
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        # Made here, so that the file gets the mode that the user's umask asks for.
        temporary.touch(exist_ok=False)
        try:
            yield temporary
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(temporary)):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


class _NoWriteError(Exception):
    """Leaves ``replacing`` as a failure does: the old file stays."""


def check_writable(path: Path) -> None:
    """Raise the OSError that writing ``path`` would end in, before the work for it begins."""
    with suppress(_NoWriteError), replacing(path):
        raise _NoWriteError


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8; readers see the old content or the new one."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
