"""Owns giving memory back to the system that was needed to start and is not needed to serve."""

from __future__ import annotations

import ctypes
import gc


def trim_heap() -> None:
    """Return freed memory to the system, where the C library can (glibc); it would keep it for later.

    Takes milliseconds: for a moment when nobody waits.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
