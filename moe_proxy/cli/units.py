"""Owns how numbers with units are written for people."""

from __future__ import annotations


def bytes_text(size_bytes: float) -> str:
    """``1536`` as ``1.5 KiB``."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def percent_text(part: float, whole: float) -> str:
    """A share in percent; a dash when there is no whole yet."""
    return f"{100 * part / whole:.1f} %" if whole else "-"
