"""The cascade: ask in turn, stop at the first that is sure enough, abstain when none is."""

from __future__ import annotations

import pytest

from moe_proxy.domains.base import Classification
from moe_proxy.domains.cascade import Cascade


class Fixed:
    """Says the same of every text, and counts how often it is asked."""

    slow = False

    def __init__(self, name: str, distribution: dict[str, float]) -> None:
        self.name = name
        self.distribution = distribution
        self.asked = 0

    def classify(self, text: str) -> Classification:
        """The fixed answer."""
        self.asked += 1
        return Classification(self.distribution, self.name)


def test_the_first_that_is_sure_enough_decides() -> None:
    """The cascade stops at the first classifier that is sure enough."""
    unsure = Fixed("first", {"math": 0.6, "logic": 0.4})
    sure = Fixed("second", {"logic": 0.9, "math": 0.1})
    never = Fixed("third", {"debug": 1.0})
    answer = Cascade([(unsure, 0.7), (sure, 0.9), (never, 0.0)]).classify("text")
    assert (answer.domain, answer.classifier) == ("logic", "second")
    assert (unsure.asked, sure.asked, never.asked) == (1, 1, 0)


def test_an_abstention_is_never_sure() -> None:
    """An abstention passes on, also at a threshold of 0."""
    answer = Cascade([(Fixed("first", {}), 0.0), (Fixed("second", {"math": 1.0}), 0.5)]).classify("text")
    assert answer.classifier == "second"


def test_it_abstains_when_none_is_sure() -> None:
    """No domain rather than a wrong one, in the name of the last that was asked."""
    answer = Cascade([(Fixed("first", {"math": 0.5, "logic": 0.5}), 0.8)]).classify("text")
    assert (answer.domain, answer.confidence, answer.classifier) == (None, 0.0, "first")
    assert Cascade([]).classify("text").domain is None


def test_thresholds_are_probabilities() -> None:
    """A threshold that no probability can be compared with is a mistake of the caller."""
    with pytest.raises(ValueError, match=r"1\.5"):
        Cascade([(Fixed("first", {}), 1.5)])


def test_unsure_answers_are_pooled() -> None:
    """When none is sure alone, what they agree on may be sure enough."""
    first = Fixed("first", {"math": 0.6, "logic": 0.4})
    second = Fixed("second", {"math": 0.7, "logic": 0.3})
    answer = Cascade([(first, 0.9), (second, 0.9)], pooled_threshold=0.75).classify("text")
    assert (answer.domain, answer.classifier) == ("math", "first+second")
    assert answer.confidence == pytest.approx(0.42 / 0.54)
    assert Cascade([(first, 0.9), (second, 0.9)], pooled_threshold=0.8).classify("text").domain is None
    with pytest.raises(ValueError, match="pooled"):
        Cascade([], pooled_threshold=2.0)


def test_pooled_answers_have_weights_by_who_answered() -> None:
    """Calibrated weights are exponents, and those of the classifiers that did answer."""
    first = Fixed("first", {"math": 0.6, "logic": 0.4})
    second = Fixed("second", {"math": 0.3, "logic": 0.7})
    silent = Fixed("third", {})
    weights = {"first+second": {"first": 3.0, "second": 0.0}, "second": {"second": 0.5}}
    steps = [(first, 1.0), (second, 1.0), (silent, 1.0)]
    answer = Cascade(steps, pooled_threshold=0.0, weights=weights).classify("text")
    assert answer.distribution["math"] == pytest.approx(0.6**3 / (0.6**3 + 0.4**3))
    alone = Cascade(steps[1:], pooled_threshold=0.0, weights=weights).classify("text")
    assert alone.distribution["logic"] == pytest.approx(0.7**0.5 / (0.7**0.5 + 0.3**0.5))


def test_a_cascade_is_as_slow_as_its_slowest() -> None:
    """Slow classifiers run off the loop: a cascade that may ask one is slow."""
    quick, slow = Fixed("a", {}), Fixed("b", {})
    slow.slow = True
    assert not Cascade([(quick, 0.5)]).slow
    assert Cascade([(quick, 0.5), (slow, 0.5)]).slow
