"""Owns measuring how fast this machine reads from RAM with so many threads. It blocks."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil

_RAM_BYTES = 2**29
"""Read at once: more than any cache holds."""
_REPEATS = 5


def ram_bytes_per_s(threads: int) -> float:
    """Bytes per second that ``threads`` threads read together from RAM; the best of several passes."""
    size = min(_RAM_BYTES, psutil.virtual_memory().available // 8)
    # Signed words: their maximum is what numpy computes fastest, so that reading is what takes the time.
    parts = [np.zeros(max(1, size // 8 // threads), np.int64) for _ in range(threads)]
    for part in parts:
        part.fill(1)  # zero pages would all be the same one
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_REPEATS):
            began = time.perf_counter()
            list(pool.map(np.max, parts))
            best = max(best, sum(part.nbytes for part in parts) / (time.perf_counter() - began))
    return best
