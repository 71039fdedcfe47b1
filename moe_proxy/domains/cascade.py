"""Owns the order in which classifiers are asked and when an answer is sure enough;

it never classifies itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from moe_proxy.domains.base import Classification, Classifier


class Cascade:
    """Asks classifiers in turn and stops at the first that is sure enough.

    ``steps`` pairs a classifier with the confidence from which its answer stands. When none is sure, the
    cascade abstains, in the name of the last one asked: no domain is better than a wrong one.
    """

    name = "cascade"

    def __init__(self, steps: Sequence[tuple[Classifier, float]]) -> None:
        for classifier, threshold in steps:
            if not 0.0 <= threshold <= 1.0:
                raise ValueError(
                    f"threshold {threshold} of classifier {classifier.name} is not between 0 and 1"
                )
        self._steps = tuple(steps)

    def classify(self, text: str) -> Classification:
        """The first sure answer, or an abstention."""
        asked = self.name
        for classifier, threshold in self._steps:
            answer = classifier.classify(text)
            asked = answer.classifier
            if answer.distribution and answer.confidence >= threshold:
                return answer
        return Classification({}, asked)
