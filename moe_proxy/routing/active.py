"""Owns which requests are active and which prior they ask for together.

It decides what is worth pushing; it never pushes, and knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping

from moe_proxy.routing.prior import Array, Prior, domain_weights, mixture, prior_of, total_variation
from moe_proxy.routing.router_map import RouterMap


class ActiveRequests:
    """The distributions of the requests that are running now. Used from one thread."""

    def __init__(self, router_map: RouterMap | None, *, kappa: float, min_distance: float) -> None:
        self._map = router_map
        self._kappa = kappa
        self._min_distance = min_distance
        self._distributions: dict[str, Mapping[str, float]] = {}
        self._current: Prior | None = None
        # What the last prior was made of: its domains' weights, and the picks they mix to.
        self._weights: Array | None = None
        self._picks: Array | None = None

    def __len__(self) -> int:
        return len(self._distributions)

    @property
    def prior(self) -> Prior | None:
        """The last prior that was worth pushing."""
        return self._current

    def use(self, router_map: RouterMap | None) -> None:
        """Make priors from ``router_map`` from the next change of the active requests on."""
        self._map = router_map
        # Equal weights no longer mean equal mixtures.
        self._weights = None

    def begin(self, request_id: str, distribution: Mapping[str, float]) -> Prior | None:
        """Add a request (an empty distribution is an abstention); the prior to push now, or None."""
        self._distributions[request_id] = distribution
        return self._moved()

    def end(self, request_id: str) -> Prior | None:
        """Remove a request; the prior to push now, or None.

        When the last one leaves, the prior stays: the next request is likely to be of the same kind.
        """
        self._distributions.pop(request_id, None)
        return self._moved() if self._distributions else None

    def _moved(self) -> Prior | None:
        weights = domain_weights(self._map, tuple(self._distributions.values()))
        if self._map is None or weights is None:
            return None
        # Mixtures are never further apart than their weights, which are few: most requests end here.
        if self._near(self._weights, weights):
            return None
        picks = mixture(self._map, weights)
        if self._near(self._picks, picks):
            return None
        self._weights, self._picks = weights, picks
        self._current = prior_of(self._map, picks, self._kappa)
        return self._current

    def _near(self, last: Array | None, now: Array) -> bool:
        return last is not None and total_variation(last, now) <= self._min_distance
