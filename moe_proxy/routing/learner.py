"""Owns what is learned of a model's routing from finished requests: counts by domain, old ones fading.

Pure: counts in, a router map out, and its own state as text. It never reads a prompt, a clock or a file.

Each domain keeps two things: the counts learned, and the share of the shipped map's counts that is left.
A request of T tokens and distribution q multiplies both of domain d by ``2^(-q_d T / half_life)`` and
adds ``q_d`` times the request's counts. So the map starts as the shipped one and ends as the
deployment's own traffic.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_proxy.errors import RouterMapError
from moe_proxy.routing.router_map import DomainCounts, ModelKey, RouterMap

FORMAT = "moe-learned/1"

_LEAST_SHARE = 0.01
"""Of a distribution; less than this is the tail of a softmax and teaches nothing."""

Counts = npt.NDArray[np.float64]


@dataclass
class _Learned:
    counts: Counts  # (MoE layers, experts)
    tokens: float = 0.0
    shipped_share: float = 1.0


@dataclass
class Learner:
    """Learned counts of the model of ``key``, on top of ``shipped`` (None: there is no map of it)."""

    key: ModelKey
    shipped: RouterMap | None
    half_life_tokens: float
    _domains: dict[str, _Learned] = field(default_factory=dict)

    @property
    def tokens(self) -> Mapping[str, float]:
        """Tokens learned and not faded, by domain."""
        return {label: learned.tokens for label, learned in self._domains.items()}

    def learn(self, distribution: Mapping[str, float], tokens: int, counts: npt.NDArray[np.int64]) -> bool:
        """Add one request's ``counts`` (MoE layers, experts) to its domains; whether that changed anything.

        An abstention (an empty distribution) and a request without tokens teach nothing.
        """
        if tokens <= 0:
            return False
        shares = {label: share for label, share in distribution.items() if share >= _LEAST_SHARE}
        for label, share in shares.items():
            learned = self._domains.setdefault(label, self._nothing())
            kept = 0.5 ** (share * tokens / self.half_life_tokens)
            learned.counts = learned.counts * kept + share * counts
            learned.tokens = learned.tokens * kept + share * tokens
            learned.shipped_share *= kept
        return bool(shares)

    def merged(self) -> RouterMap | None:
        """The map to favour experts by now: what is left of the shipped one, and what was learned."""
        if not self._domains:
            return self.shipped
        shipped = self.shipped.domains if self.shipped else {}
        domains = dict(shipped)
        for label, learned in self._domains.items():
            counts, tokens = learned.counts, learned.tokens
            if self.shipped and label in shipped:
                counts = counts + learned.shipped_share * self.shipped.counts[label]
                tokens += learned.shipped_share * shipped[label].tokens
            rows = np.rint(counts).astype(np.int64).tolist()
            layers = {layer: tuple(row) for layer, row in zip(self.key.layers, rows, strict=True)}
            domains[label] = DomainCounts(round(tokens), layers)
        made = dict(self.shipped.made) if self.shipped else {}
        return RouterMap(self.key, {**made, "learned": True}, domains)

    def forget(self) -> None:
        """Back to the shipped map."""
        self._domains.clear()

    def dump(self) -> str:
        """All that was learned as text; ``restore`` gives exactly the same counts back."""
        domains = {
            label: {
                "tokens": learned.tokens,
                "shipped_share": learned.shipped_share,
                "layers": dict(zip(map(str, self.key.layers), learned.counts.tolist(), strict=True)),
            }
            for label, learned in self._domains.items()
        }
        return json.dumps({"format": FORMAT, "fingerprint": self.key.fingerprint, "domains": domains})

    def restore(self, text: str, source: str) -> None:
        """Take up what ``dump`` wrote. Raises RouterMapError, naming ``source``, and then keeps what it
        had.
        """
        try:
            document: Any = json.loads(text)
            if document["format"] != FORMAT or document["fingerprint"] != self.key.fingerprint:
                raise ValueError("it is of another format or of another model")
            found = {
                str(label): _Learned(
                    self._checked(entry["layers"]),
                    _amount(entry["tokens"]),
                    min(_amount(entry["shipped_share"]), 1.0),
                )
                for label, entry in document["domains"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise RouterMapError(
                f"{source} holds no learned counts of {self.key.name!r} ({type(error).__name__}: {error})",
                "forget them with moe-proxy map reset",
            ) from error
        self._domains = found

    def _nothing(self) -> _Learned:
        return _Learned(np.zeros((len(self.key.layers), self.key.experts)))

    def _checked(self, layers: Mapping[str, object]) -> Counts:
        if set(layers) != {str(layer) for layer in self.key.layers}:
            raise ValueError("its layers are not the model's")
        counts = np.array([layers[str(layer)] for layer in self.key.layers], np.float64)
        if counts.shape != (len(self.key.layers), self.key.experts):
            raise ValueError(f"its counts have the shape {counts.shape}")
        if not (np.isfinite(counts).all() and (counts >= 0).all()):
            raise ValueError("a count is negative or no number")
        return counts


def _amount(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ValueError(f"{value!r} is no amount")
    return float(value)
