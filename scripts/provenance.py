"""Owns how a generated report names what it judged, so that the name stays true whatever becomes of commits:

the version and a hash of the content of the files that decide the figures. It never asks git.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from moe_proxy import __version__

ROOT = Path(__file__).resolve().parent.parent
DIGITS = 12


def content_hash(paths: Iterable[Path]) -> str:
    """Hash of the names and the content of ``paths`` and, of a folder, of all files in it."""
    digest = hashlib.sha256()
    files = [f for path in paths for f in (path.rglob("*") if path.is_dir() else (path,))]
    for file in sorted(f for f in files if f.is_file() and "__pycache__" not in f.parts):
        name = file.resolve().relative_to(ROOT) if file.resolve().is_relative_to(ROOT) else file.name
        digest.update(f"{name}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:DIGITS]


def judged(*paths: Path) -> str:
    """The version and the hash of what is judged, in words."""
    return f"moe-proxy {__version__}, content {content_hash(paths)}"
