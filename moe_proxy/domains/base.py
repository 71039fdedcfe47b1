"""Owns what a classifier is and what it answers; it never classifies anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

DOMAINS = ("codegen", "debug", "math", "logic", "general_qa", "chinese_tech", "creative_write", "translate")


@dataclass(frozen=True)
class Classification:
    """What a classifier says of one text.

    ``distribution`` maps domains to probabilities that add up to 1; it is empty when the classifier abstains.
    ``classifier`` is the name of the classifier that decided.
    """

    distribution: Mapping[str, float]
    classifier: str

    @property
    def domain(self) -> str | None:
        """The likeliest domain, or None for an abstention."""
        return max(self.distribution, key=self.distribution.__getitem__) if self.distribution else None

    @property
    def confidence(self) -> float:
        """The likeliest domain's probability; 0 for an abstention."""
        return max(self.distribution.values(), default=0.0)


class Classifier(Protocol):
    """Text to a distribution over domains. Implementations are pure; a slow one is called from any thread."""

    @property
    def name(self) -> str:
        """Short name for configuration and reports."""
        ...

    @property
    def slow(self) -> bool:
        """Whether it takes longer than an event loop can wait."""
        ...

    def classify(self, text: str) -> Classification:
        """Classify ``text``; an empty distribution is an abstention."""
        ...
