"""What is derived from a map."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moe_proxy.errors import RouterMapError
from moe_proxy.routing.map_facts import coverage, keep_top, merge, only, overlap, picture
from tests.unit.test_router_map import KEY, MAP


def test_coverage() -> None:
    """The share of picks that go to each layer's k busiest experts."""
    counts = np.array([[6, 2, 1, 1], [5, 0, 5, 0]])
    assert coverage(counts, 1) == pytest.approx(11 / 20)
    assert coverage(counts, 2) == pytest.approx(18 / 20)
    assert coverage(counts, 4) == 1.0
    assert coverage(np.zeros((2, 4), np.int64), 2) == 0.0


def test_overlap() -> None:
    """1 for equal routing, 0 for disjoint; layers without counts are left out."""
    a, b = np.array([[4, 4, 0, 0], [0, 0, 0, 0]]), np.array([[0, 0, 1, 1], [1, 1, 1, 1]])
    assert overlap(a, a * 7) == 1.0
    assert overlap(a, b) == 0.0
    assert overlap(a, np.array([[1, 0, 1, 0], [1, 1, 1, 1]])) == pytest.approx(0.5)
    assert overlap(a, np.zeros_like(a)) == 0.0


def test_picture() -> None:
    """A line per layer; experts share a character where the terminal is narrow."""
    counts = np.array([[8, 0, 4, 1], [0, 0, 0, 0]])
    assert picture(counts, 80) == ["█ ▒░", "    "]
    assert picture(counts, 2) == ["█▒", "  "]


def test_merge() -> None:
    """Counts and tokens add up by domain; maps of two models do not."""
    merged = merge([MAP, MAP])
    assert merged.domains["codegen"].tokens == 2 * MAP.domains["codegen"].tokens
    assert merged.domains["codegen"].layers[1] == (20, 10, 6, 4)
    with pytest.raises(RouterMapError, match="different models"):
        merge([MAP, replace(MAP, model=replace(KEY, name="other"))])


def test_keep_top() -> None:
    """--router-top-k keeps each layer's busiest experts of each domain."""
    kept = keep_top(MAP, 2)
    assert kept.domains["codegen"].layers == {1: (10, 5, 0, 0), 3: (5, 5, 0, 0)}
    assert keep_top(MAP, 9).domains == MAP.domains


def test_only() -> None:
    """One domain alone, with its own tokens; a domain that the map does not hold is refused."""
    kept = only(MAP, "codegen")
    assert kept.domains == {"codegen": MAP.domains["codegen"]}
    assert kept.made["tokens"] == MAP.domains["codegen"].tokens
    with pytest.raises(RouterMapError, match="no domain 'bogus'"):
        only(MAP, "bogus")
