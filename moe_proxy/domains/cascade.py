"""Owns the order in which classifiers are asked and when an answer is sure enough;

it never classifies itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from moe_proxy.domains.base import Classification, Classifier

_LEAST = 1e-6
"""Probability below which one classifier cannot push a label: none may veto what the others see."""


class Cascade:
    """Asks classifiers in turn and stops at the first that is sure enough.

    ``steps`` pairs a classifier with the confidence from which its answer stands alone. When none does, the
    answers are pooled, and the pooled one stands from ``pooled_threshold`` on (None: never). Otherwise
    the cascade abstains, in the name of the last one asked: no domain is better than a wrong one.
    """

    name = "cascade"

    @property
    def slow(self) -> bool:
        """Whether one of those it may ask is."""
        return any(classifier.slow for classifier, _ in self._steps)

    def __init__(
        self, steps: Sequence[tuple[Classifier, float]], pooled_threshold: float | None = None
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
            pooled = Classification(
                pool([answer.distribution for answer in answers]),
                "+".join(answer.classifier for answer in answers),
            )
            if pooled.confidence >= self._pooled_threshold:
                return pooled
        return Classification({}, asked)


def pool(distributions: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Product of distributions, scaled to add up to 1 (logarithmic opinion pool with unit weights).

    Right when the classifiers err independently; a label that one does not know counts as next to
    impossible there.
    """
    labels = dict.fromkeys(label for distribution in distributions for label in distribution)
    logs = {
        label: sum(math.log(max(distribution.get(label, 0.0), _LEAST)) for distribution in distributions)
        for label in labels
    }
    highest = max(logs.values())
    odds = {label: math.exp(value - highest) for label, value in logs.items()}
    total = sum(odds.values())
    return {label: value / total for label, value in odds.items()}
