"""Owns where the data that ships with the package lies; it never reads or interprets it."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def data_path(name: str) -> Path:
    """Path of shipped data: ``LLAMA_CPP_VERSION``, ``maps``, ``native``, ``patches`` or ``weights``.

    An installed wheel carries it inside the package, a checkout has it at its root.
    """
    installed = _PACKAGE / "_data"
    return (installed if installed.is_dir() else _PACKAGE.parent) / name
