"""Owns how a duration is written: Go's form, which Ollama's users know, and plain seconds. Pure."""

from __future__ import annotations

import re

_AMOUNT = r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)"
_WHOLE = re.compile(rf"([-+]?)((?:{_AMOUNT})+)")
_PART = re.compile(_AMOUNT)
_SECONDS = re.compile(r"[-+]?\d{1,15}")
_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_seconds(text: str) -> float | None:
    """Seconds of ``5m``, ``1h30m``, ``-1m`` or ``300``; None when it is no duration."""
    stripped = text.strip()
    match = _WHOLE.fullmatch(stripped)
    if match:
        seconds = sum(float(amount) * _UNIT_S[unit] for amount, unit in _PART.findall(match[2]))
        return -seconds if match[1] == "-" else seconds
    return float(stripped) if _SECONDS.fullmatch(stripped) else None
