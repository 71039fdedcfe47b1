"""Owns how the domains of the present requests become a prior over experts.

Pure; it never pushes one anywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_proxy.routing.router_map import RouterMap

_DIGITS = 6
"""Decimals of a probability: more would only make the id of equal mixtures differ."""
_ID_DIGITS = 12

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Prior:
    """How likely one token of the present requests is to pick each expert; ``kappa`` tokens is its weight.

    ``layers`` gives, for each MoE layer, pairs of expert and probability. A layer's probabilities add up to
    ``experts_used``, as a token picks that many.
    """

    id: str
    kappa: float
    layers: Mapping[int, tuple[tuple[int, float], ...]]

    def to_json(self) -> dict[str, object]:
        """The body of ``POST /experts/prior``."""
        layers = {str(layer): [list(pair) for pair in row] for layer, row in self.layers.items()}
        return {"id": self.id, "kappa": self.kappa, "layers": layers}


def pick_probabilities(counts: npt.NDArray[np.int64], experts_used: int) -> Array:
    """``p(l, e)``: how likely one token picks expert ``e`` in layer ``l``; both arrays are (layers, experts).

    Add-one smoothing of the picks (Laplace), times the picks that one token makes, so that a layer without
    counts is uniform.
    """
    experts = counts.shape[1]
    p: Array = experts_used * (counts + 1.0) / (counts.sum(axis=1, keepdims=True) + experts)
    return np.minimum(p, 1.0)


def mixture_prior(
    router_map: RouterMap | None,
    active: Sequence[Mapping[str, float]],
    kappa: float,
    prior_id: str | None = None,
) -> Prior | None:
    """``mean_r sum_d q_r(d) p_d(l, e)`` over the active requests' distributions ``q_r``.

    An abstention (an empty distribution), and probability on a label that the map does not know, count as the
    average of all the map's domains. None without a map, without a domain in it or without a request.
    ``prior_id`` defaults to a hash of the content: equal mixtures have equal ids.
    """
    if router_map is None or not router_map.domains or not active:
        return None
    labels = tuple(router_map.domains)
    weights = np.zeros(len(labels))
    for distribution in active:
        known = np.array([max(distribution.get(label, 0.0), 0.0) for label in labels])
        total = sum(max(p, 0.0) for p in distribution.values())
        share = known / total if total > 0 else known
        weights += share + (1.0 - share.sum()) / len(labels)
    weights /= len(active)
    used = router_map.model.experts_used
    mixture = sum(
        (
            w * pick_probabilities(router_map.counts[label], used)
            for w, label in zip(weights, labels, strict=True)
        ),
        np.zeros((len(router_map.model.layers), router_map.model.experts)),
    )
    layers = {
        layer: tuple(enumerate(row))
        for layer, row in zip(router_map.model.layers, np.round(mixture, _DIGITS).tolist(), strict=True)
    }
    return Prior(prior_id if prior_id is not None else _content_id(kappa, layers), float(kappa), layers)


def total_variation(a: Prior | None, b: Prior | None) -> float:
    """Distance of two priors in [0, 1]: the mean over layers of half the L1 distance of the normalised rows.

    No prior is at distance 1 from any prior, and so is the prior of another model.
    """
    if a is None or b is None:
        return 0.0 if a is b else 1.0
    if a.layers.keys() != b.layers.keys():
        return 1.0
    distances = [_row_distance(dict(a.layers[layer]), dict(b.layers[layer])) for layer in a.layers]
    return min(sum(distances) / len(distances), 1.0) if distances else 0.0


def _row_distance(a: Mapping[int, float], b: Mapping[int, float]) -> float:
    total_a, total_b = sum(a.values()), sum(b.values())
    if total_a <= 0 or total_b <= 0:
        return 0.0 if total_a <= 0 and total_b <= 0 else 1.0
    return sum(abs(a.get(e, 0.0) / total_a - b.get(e, 0.0) / total_b) for e in a.keys() | b.keys()) / 2


def _content_id(kappa: float, layers: Mapping[int, Sequence[tuple[int, float]]]) -> str:
    content = json.dumps([float(kappa), sorted((layer, list(row)) for layer, row in layers.items())])
    return hashlib.sha256(content.encode()).hexdigest()[:_ID_DIGITS]
