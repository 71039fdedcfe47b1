"""Owns the order in which classifiers are asked and when an answer is sure enough;

it never classifies itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from moe_proxy.domains.base import Classification, Classifier

LEAST = 1e-6
"""Probability below which one classifier cannot push a label: none may veto what the others see."""


class Cascade:
    """Asks classifiers in turn and stops at the first that is sure enough.

    ``steps`` pairs a classifier with the confidence from which its answer stands alone. When none does, the
    answers are pooled, and the pooled one stands from ``pooled_threshold`` on (None: never). Otherwise the
    cascade abstains, in the name of the last one asked: no domain is better than a wrong one. ``weights``
    gives, by the names of the classifiers that answered, joined with "+", the weight of each (none: 1).
    """

    name = "cascade"

    @property
    def slow(self) -> bool:
        """Whether one of those it may ask is."""
        return any(classifier.slow for classifier, _ in self._steps)

    def __init__(
        self,
        steps: Sequence[tuple[Classifier, float]],
        pooled_threshold: float | None = None,
        weights: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        for classifier, threshold in steps:
            if not 0.0 <= threshold <= 1.0:
                raise ValueError(
                    f"threshold {threshold} of classifier {classifier.name} is not between 0 and 1"
                )
        if pooled_threshold is not None and not 0.0 <= pooled_threshold <= 1.0:
            raise ValueError(f"threshold {pooled_threshold} of the pooled answer is not between 0 and 1")
        self._steps = tuple(steps)
        self._pooled_threshold = pooled_threshold
        self._weights = weights or {}

    def classify(self, text: str) -> Classification:
        """The first sure answer, the pooled one if that is sure enough, or an abstention."""
        answers = []
        asked = self.name
        for classifier, threshold in self._steps:
            answer = classifier.classify(text)
            asked = answer.classifier
            if answer.distribution:
                if answer.confidence >= threshold:
                    return answer
                answers.append(answer)
        if self._pooled_threshold is not None and answers:
            names = "+".join(answer.classifier for answer in answers)
            weights = self._weights.get(names, {})
            pooled = Classification(
                pool(
                    [answer.distribution for answer in answers],
                    [weights.get(answer.classifier, 1.0) for answer in answers],
                ),
                names,
            )
            if pooled.confidence >= self._pooled_threshold:
                return pooled
        return Classification({}, asked)


def pool(distributions: Sequence[Mapping[str, float]], weights: Sequence[float]) -> dict[str, float]:
    """Product of powers of distributions, scaled to add up to 1: a logarithmic opinion pool.

    ``weights`` are the exponents. A label that a classifier does not know counts as next to impossible there.
    """
    labels = dict.fromkeys(label for distribution in distributions for label in distribution)
    logs = {
        label: sum(
            weight * math.log(max(distribution.get(label, 0.0), LEAST))
            for distribution, weight in zip(distributions, weights, strict=True)
        )
        for label in labels
    }
    highest = max(logs.values())
    odds = {label: math.exp(value - highest) for label, value in logs.items()}
    total = sum(odds.values())
    return {label: value / total for label, value in odds.items()}
