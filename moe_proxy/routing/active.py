"""Owns which requests are active and which prior they ask for together.

It decides what is worth pushing; it never pushes, and knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from moe_proxy.routing.prior import Array, Prior, domain_weights, mixture, prior_of, total_variation
from moe_proxy.routing.router_map import RouterMap


class ActiveRequests:
    """The distributions of the requests that are running now. Used from one thread."""

    def __init__(self, router_map: RouterMap | None, *, kappa: float, min_distance: float) -> None:
        self._map = router_map
        self._kappa = kappa
        self._min_distance = min_distance
        self._distributions: dict[str, Mapping[str, float]] = {}
        # Of each of them its share of every domain of the map; nothing without a map or a domain in it.
        self._shares: dict[str, Array] = {}
        # The sum of the shares. Kept, because adding up all of them twice per request is most of the work.
        self._total: Array | float = 0.0
        self._current: Prior | None = None
        # The picks of the last prior; the weights looked at last, and how far their picks are from it.
        self._picks: Array | None = None
        self._weights: Array | None = None
        self._distance = 0.0

    def __len__(self) -> int:
        return len(self._distributions)

    @property
    def prior(self) -> Prior | None:
        """The last prior that was worth pushing."""
        return self._current

    def use(self, router_map: RouterMap | None) -> None:
        """Make priors from ``router_map`` from the next change of the active requests on."""
        former, self._map = self._map, router_map
        # Shares are of domains, and a map that learns keeps those it has.
        if tuple(former.domains if former else ()) != tuple(router_map.domains if router_map else ()):
            self._shares, self._total = {}, 0.0
            for request_id, distribution in self._distributions.items():
                self._add(request_id, distribution)
        # Equal weights no longer mean equal mixtures.
        self._weights = None

    def begin(self, request_id: str, distribution: Mapping[str, float]) -> Prior | None:
        """``add``, and the prior to push now, or None."""
        self.add(request_id, distribution)
        return self.moved()

    def end(self, request_id: str) -> Prior | None:
        """``remove``, and the prior to push now, or None."""
        self.remove(request_id)
        return self.moved()

    def add(self, request_id: str, distribution: Mapping[str, float]) -> None:
        """A request has begun; an empty distribution is an abstention."""
        self._distributions[request_id] = distribution
        self._drop(request_id)
        self._add(request_id, distribution)

    def remove(self, request_id: str) -> None:
        """A request has ended."""
        self._distributions.pop(request_id, None)
        self._drop(request_id)

    def moved(self) -> Prior | None:
        """The prior to push now, if the mixture has moved enough since the last one; else None.

        When the last request leaves, the prior stays: the next one is likely to be of the same kind.
        """
        return self._moved() if self._distributions else None

    def _add(self, request_id: str, distribution: Mapping[str, float]) -> None:
        share = domain_weights(self._map, (distribution,))
        if share is not None:
            self._shares[request_id] = share
            self._total = self._total + share

    def _drop(self, request_id: str) -> None:
        share = self._shares.pop(request_id, None)
        if share is not None:
            # From zero again whenever nobody is left, so that rounding never adds up.
            self._total = self._total - share if self._shares else 0.0

    def _moved(self) -> Prior | None:
        if self._map is None or isinstance(self._total, float):
            return None
        weights: Array = self._total / len(self._shares)
        # Mixtures are never further apart than their weights, which are few. So how far the mixture looked at
        # last is from the pushed one, and its weights from these, is a bound: most requests end here.
        if self._weights is not None:
            step = float(np.abs(weights - self._weights).sum()) / 2
            if self._distance + step <= self._min_distance:
                return None
        picks = mixture(self._map, weights)
        self._weights = weights
        self._distance = 0.0 if self._picks is None else total_variation(self._picks, picks)
        if self._picks is not None and self._distance <= self._min_distance:
            return None
        self._picks, self._distance = picks, 0.0
        self._current = prior_of(self._map, picks, self._kappa)
        return self._current
