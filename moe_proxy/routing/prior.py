"""Owns how the domains of the present requests become a prior over experts.

Pure; it never pushes one anywhere.
"""

from __future__ import annotations

import hashlib
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
        layers = {str(layer): row for layer, row in self.layers.items()}
        return {"id": self.id, "kappa": self.kappa, "layers": layers}


def domain_weights(router_map: RouterMap | None, active: Sequence[Mapping[str, float]]) -> Array | None:
    """Share of each of the map's domains in the active requests' distributions, in the map's order; sum 1.

    An abstention (an empty distribution), and probability on a label that the map does not know, count as the
    average of all the map's domains. None without a map, without a domain in it or without a request.
    """
    if router_map is None or not router_map.domains or not active:
        return None
    labels = tuple(router_map.domains)
    weights = np.zeros(len(labels))
    for distribution in active:
        # Plain numbers: there are few, and an array costs more than they do.
        known = [max(distribution.get(label, 0.0), 0.0) for label in labels]
        total = sum(max(p, 0.0) for p in distribution.values()) or 1.0
        rest = (1.0 - sum(known) / total) / len(labels)
        weights += [p / total + rest for p in known]
    weights /= len(active)
    return weights


def mixture(router_map: RouterMap, weights: Array) -> Array:
    """``sum_d w(d) p_d(l, e)``, rounded; shape (MoE layers, experts)."""
    picks = router_map.pick_probabilities
    # As one product of a vector and a matrix: for small maps, tensordot takes thrice as long.
    mixed: Array = np.round(weights @ picks.reshape(len(picks), -1), _DIGITS).reshape(picks.shape[1:])
    return mixed


def prior_of(router_map: RouterMap, picks: Array, kappa: float, prior_id: str | None = None) -> Prior:
    """``picks``, a mixture of the map's domains, as a prior.

    ``prior_id`` defaults to a hash of the content: equal mixtures have equal ids.
    """
    numbers = router_map.model.layers
    if prior_id is None:
        content = f"{float(kappa)} {numbers} {picks.shape} ".encode() + picks.tobytes()
        prior_id = hashlib.sha256(content).hexdigest()[:_ID_DIGITS]
    rows = (tuple(enumerate(row)) for row in picks.tolist())
    return Prior(prior_id, float(kappa), dict(zip(numbers, rows, strict=True)))


def mixture_prior(
    router_map: RouterMap | None,
    active: Sequence[Mapping[str, float]],
    kappa: float,
    prior_id: str | None = None,
) -> Prior | None:
    """``mean_r sum_d q_r(d) p_d(l, e)`` over the active distributions ``q_r``; None as in domain_weights."""
    weights = domain_weights(router_map, active)
    if router_map is None or weights is None:
        return None
    return prior_of(router_map, mixture(router_map, weights), kappa, prior_id)


def total_variation(a: Array, b: Array) -> float:
    """Distance of two mixtures of one map in [0, 1]: half the L1 distance of the normalised rows, on average.

    One row (a vector of weights) is a mixture of one layer.
    """
    a, b = np.atleast_2d(a), np.atleast_2d(b)
    # On the way of every request: the method that numpy's sum and mean end in.
    add = np.add.reduce
    apart = np.abs(a / add(a, axis=1, keepdims=True) - b / add(b, axis=1, keepdims=True))
    return min(float(add(apart, axis=None)) / len(a) / 2, 1.0)
