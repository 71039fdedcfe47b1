"""Owns what is derived from a router map to look at it: coverage, overlap, merging, the top experts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from moe_proxy.errors import RouterMapError
from moe_proxy.routing.router_map import DomainCounts, RouterMap

SHADES = " ░▒▓█"


def coverage(counts: npt.NDArray[np.int64], k: int) -> float:
    """Share of the picks in ``counts`` (layers, experts) that go to each layer's ``k`` busiest experts.

    0 without picks.
    """
    total = int(counts.sum())
    return float(np.sort(counts, axis=1)[:, -k:].sum() / total) if total else 0.0


def share_within(picks: npt.NDArray[np.float64], expert_bytes: Sequence[int], budget_bytes: int) -> float:
    """Share of the picks that the best experts per byte take, as many as ``budget_bytes`` hold.

    ``picks``: of each expert, (layers, experts), in any unit; ``expert_bytes``: of one expert, per layer. The
    pager's own rule: residency is global over all layers. 0 without picks.
    """
    sizes = np.repeat(np.asarray(expert_bytes, np.int64), picks.shape[1])
    flat = picks.ravel()
    order = np.argsort(-flat / sizes, kind="stable")
    held = np.cumsum(sizes[order]) <= budget_bytes
    total = float(flat.sum())
    return float(flat[order][held].sum() / total) if total else 0.0


def overlap(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> float:
    """How alike two domains route, in [0, 1]: the mean over layers of ``sum_e min(p_a(e), p_b(e))``.

    1 minus the total variation distance. Layers in which one of them has no picks are left out.
    """
    totals = a.sum(axis=1), b.sum(axis=1)
    known = (totals[0] > 0) & (totals[1] > 0)
    if not known.any():
        return 0.0
    shares = [counts[known] / total[known, None] for counts, total in zip((a, b), totals, strict=True)]
    return float(np.minimum(*shares).sum(axis=1).mean())


def picture(counts: npt.NDArray[np.int64], width: int) -> list[str]:
    """One line per layer (the row of ``counts``), one character per expert or per few of them: darker is
    busier.

    A character is the busiest of its experts relative to the layer's busiest one.
    """
    experts = counts.shape[1]
    per = -(-experts // max(width, 1))
    lines = []
    for row in counts:
        cells = [int(row[at : at + per].max()) for at in range(0, experts, per)]
        most = max(max(cells), 1)
        lines.append("".join(SHADES[-(-cell * (len(SHADES) - 1) // most)] for cell in cells))
    return lines


def merge(maps: Sequence[RouterMap]) -> RouterMap:
    """The sum of maps of one model, domain by domain. Raises RouterMapError for maps of different models."""
    first = maps[0]
    domains: dict[str, DomainCounts] = {}
    for router_map in maps:
        if router_map.model != first.model:
            raise RouterMapError(
                f"the maps are of different models, {first.model.name!r} and {router_map.model.name!r}",
                "merge maps of one model only",
            )
        for label, counts in router_map.domains.items():
            domains[label] = _sum(domains[label], counts) if label in domains else counts
    made = {"tool": "moe-proxy map merge", "maps": [dict(router_map.made) for router_map in maps]}
    return RouterMap(first.model, {**made, "tokens": sum(d.tokens for d in domains.values())}, domains)


def keep_top(router_map: RouterMap, k: int) -> RouterMap:
    """The map with the counts of each domain's ``k`` busiest experts per layer, and 0 for the others."""
    domains = {}
    for label, counts in router_map.domains.items():
        layers = {}
        for layer, row in counts.layers.items():
            top = set(np.argsort(-np.array(row, np.int64), kind="stable")[:k].tolist())
            layers[layer] = tuple(count if expert in top else 0 for expert, count in enumerate(row))
        domains[label] = DomainCounts(counts.tokens, layers)
    return RouterMap(router_map.model, router_map.made, domains)


def only(router_map: RouterMap, label: str) -> RouterMap:
    """The map with one domain of it alone. Raises RouterMapError for a domain that it does not hold."""
    if label not in router_map.domains:
        raise RouterMapError(
            f"the map holds no domain {label!r}", f"it holds {', '.join(router_map.domains) or 'none'}"
        )
    kept = router_map.domains[label]
    return RouterMap(router_map.model, {**router_map.made, "tokens": kept.tokens}, {label: kept})


def _sum(a: DomainCounts, b: DomainCounts) -> DomainCounts:
    layers: Mapping[int, tuple[int, ...]] = {
        layer: tuple(x + y for x, y in zip(row, b.layers[layer], strict=True))
        for layer, row in a.layers.items()
    }
    return DomainCounts(a.tokens + b.tokens, layers)
