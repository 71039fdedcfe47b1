"""Owns what is computed from picks: counts, how far two domains are apart, what a cache of experts would hit.

``picks`` are uint8 of shape (tokens, layers, used), in the order in which the tokens came.
"""

from __future__ import annotations

import collections

import numpy as np

HOT_SHARE = 0.4
_CACHE_TOKENS = 4096


def counts_of(picks: np.ndarray, experts: int) -> np.ndarray:
    """Picks per layer and expert, (layers, experts)."""
    return np.stack(
        [np.bincount(picks[:, layer].ravel(), minlength=experts) for layer in range(picks.shape[1])]
    )


def divergence(a: np.ndarray, b: np.ndarray) -> float:
    """Jensen-Shannon divergence in bits between two routing distributions, mean over layers."""
    p, q = a / a.sum(1, keepdims=True), b / b.sum(1, keepdims=True)
    middle = (p + q) / 2

    def relative(x: np.ndarray) -> np.ndarray:
        return np.where(x > 0, x * np.log2(np.where(x > 0, x, 1) / middle), 0).sum(1)

    return float(((relative(p) + relative(q)) / 2).mean())


def lru_hits(picks: np.ndarray, slots: int) -> float:
    """Share of picks (tokens, used) of one layer that an LRU cache of ``slots`` experts holds, from empty."""
    held: collections.OrderedDict[int, None] = collections.OrderedDict()
    hits = 0
    for expert in picks.ravel().tolist():
        if expert in held:
            hits += 1
            held.move_to_end(expert)
        else:
            held[expert] = None
            if len(held) > slots:
                held.popitem(last=False)
    return hits / picks.size


def lfu_hits(picks: np.ndarray, slots: int) -> float:
    """The same for a cache that gives up the expert with the fewest picks so far."""
    held: set[int] = set()
    seen: collections.Counter[int] = collections.Counter()
    hits = 0
    for expert in picks.ravel().tolist():
        hits += expert in held
        seen[expert] += 1
        held.add(expert)
        if len(held) > slots:
            held.remove(min(held - {expert}, key=lambda other: seen[other]))
    return hits / picks.size


def coverage(picks: np.ndarray, half: np.ndarray, experts: int) -> dict[str, list[float]]:
    """Per layer: picks of one half covered by the top experts of the other half, LRU and LFU of that size."""
    slots = round(HOT_SHARE * experts)
    first = counts_of(picks[half == 0], experts)
    second = counts_of(picks[half == 1], experts)
    rows = np.arange(len(first))[:, None]
    covered = second[rows, np.argsort(-first, 1)[:, :slots]].sum(1) / second.sum(1)
    replay = picks[half == 1][:_CACHE_TOKENS]
    return {
        "top": covered.tolist(),
        "lru": [lru_hits(replay[:, layer], slots) for layer in range(replay.shape[1])],
        "lfu": [lfu_hits(replay[:, layer], slots) for layer in range(replay.shape[1])],
    }
