"""Owns how the recorded routing of the demonstration model becomes a trace that moe-pager-simulate reads.

The recording (``scripts/train_demo_moe/measure.py``) holds a row of tokens of held-out text per domain. Here
the domains take turns, and the first tokens of each turn are computed at once, as a prompt is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

EXPERTS = 32
TURN_TOKENS = 256
PROMPT_TOKENS = 64


def turns(recording: Path) -> Iterator[np.ndarray]:
    """Picks of one turn after the other, (tokens, layers, used); the domains alternate."""
    with np.load(recording) as rows:
        domains = [rows[name] for name in rows]
    for start in range(0, len(domains[0]), TURN_TOKENS):
        yield from (picks[start : start + TURN_TOKENS] for picks in domains)


def ubatches(recording: Path) -> Iterator[np.ndarray]:
    """Picks of what is computed at once: a prompt, then token after token."""
    for picks in turns(recording):
        yield picks[:PROMPT_TOKENS]
        yield from np.split(picks[PROMPT_TOKENS:], len(picks) - PROMPT_TOKENS)


def write_trace(out: Path, ubatches: Iterator[np.ndarray], experts: int) -> None:
    """Write picks, (tokens, layers, used) each, in the format of native/src/trace-writer.h."""
    with out.open("wb") as file:
        for number, picks in enumerate(ubatches):
            tokens, layers, used = picks.shape
            if number == 0:
                shapes = [
                    {"block": block, "experts": experts, "expert_bytes": 1, "pinned": False}
                    for block in range(layers)
                ]
                header = {"format": "moe-routing-trace", "version": 1, "layers": shapes}
                file.write(json.dumps(header).encode() + b"\n")
            file.write(np.array([tokens, 0], "<u4").tobytes())
            for layer in range(layers):
                file.write(np.array([tokens, used], "<u4").tobytes())
                file.write(np.ascontiguousarray(picks[:, layer]).astype("<u2").tobytes())
