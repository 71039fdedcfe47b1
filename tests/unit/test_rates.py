"""Rates are differences of counters, and what nobody counted is no data and not 0."""

from __future__ import annotations

from typing import Any

import pytest

from moe_proxy.rates import Rates, Reading, rates


def reading(
    time_s: float, *, start_id: str = "a", uptime_s: float | None = None, requests: int = 0,
    domains: dict[str, int] | None = None, in_flight: tuple[tuple[str, int | None], ...] = (), **experts: int,
) -> Reading:  # fmt: skip
    """The parts of ``/stats`` that rates are made of; the engine's clock is the same as ours unless given."""
    counters: dict[str, Any] = dict.fromkeys(
        ("tokens", "picks", "hits", "hit_bytes", "miss_bytes", "promoted_bytes"), 0
    )
    counters |= {"start_id": start_id, "uptime_us": int(time_s * 1e6)} | experts
    stats = {
        "uptime_s": time_s if uptime_s is None else uptime_s,
        "requests": {"total": requests, "domains": domains or {}},
        "in_flight": [{"id": name, "tokens": tokens} for name, tokens in in_flight],
        "experts": counters,
    }
    return Reading(time_s, stats)


def test_one_reading_is_no_data() -> None:
    """Rates come from counter differences: one reading, or two of the same moment, give none."""
    assert rates(None, reading(1.0)) == Rates()
    assert rates(reading(1.0), reading(1.0)) == Rates()


def test_rates_of_the_pager() -> None:
    """Tokens and bytes per second, and hits of the picks in between, not of all since the start."""
    before = reading(10.0, tokens=100, picks=400, hits=0, miss_bytes=5000, hit_bytes=0, promoted_bytes=7)
    after = reading(12.0, tokens=150, picks=600, hits=150, miss_bytes=9000, hit_bytes=600, promoted_bytes=7)
    found = rates(before, after)
    assert (found.tokens_per_s, found.hit_rate) == (25.0, 0.75)
    assert (found.miss_bytes_per_s, found.hit_bytes_per_s, found.promoted_bytes_per_s) == (2000.0, 300.0, 0.0)


def test_the_engines_own_clock_counts() -> None:
    """The engine says when it was asked; how long its answer took to come changes no rate."""
    found = rates(
        reading(10.0, uptime_us=1_000_000), reading(20.0, uptime_us=2_000_000, tokens=30, picks=120, hits=60)
    )
    assert found.tokens_per_s == 30.0


def test_nothing_picked_is_no_hit_rate() -> None:
    """An idle second has 0 tokens and no hit rate."""
    found = rates(reading(1.0), reading(2.0))
    assert (found.tokens_per_s, found.hit_rate) == (0.0, None)


@pytest.mark.parametrize("change", ["engine", "counter", "silent before", "silent now"])
def test_another_engine_is_no_data(change: str) -> None:
    """Counters start anew with the engine: the difference of two engines' counters means nothing."""
    before, now = reading(1.0, tokens=50, requests=3), reading(2.0, tokens=60, requests=4)
    if change == "engine":
        now = reading(2.0, start_id="b", tokens=60, requests=4)
    elif change == "counter":
        now = reading(2.0, tokens=10, requests=4)
    else:
        silent = before if change == "silent before" else now
        silent = Reading(silent.time_s, {**silent.stats, "experts": None})
        before, now = (silent, now) if change == "silent before" else (before, silent)
    found = rates(before, now)
    assert (found.tokens_per_s, found.hit_rate) == (None, None)
    assert found.requests_per_s == 1.0


def test_another_proxy_is_no_data() -> None:
    """A proxy that was started in between has other requests, whatever their number is."""
    before = reading(100.0, requests=1, domains={"math": 1}, in_flight=(("a", 1),))
    found = rates(
        before, reading(101.0, uptime_s=0.5, requests=9, domains={"math": 9}, in_flight=(("a", 9),))
    )
    assert (found.requests_per_s, found.domains, found.request_tokens_per_s) == (None, None, {})


def test_domains_are_those_of_the_time_between() -> None:
    """The timeline shows the requests classified between two readings, new domains among them."""
    before = reading(1.0, requests=4, domains={"math": 2, "codegen": 1})
    found = rates(before, reading(3.0, requests=8, domains={"math": 2, "codegen": 3, "law": 1}))
    assert (found.requests_per_s, found.domains) == (2.0, {"codegen": 2, "law": 1})


def test_each_request_in_flight_has_its_own_rate() -> None:
    """Only where its tokens are known twice; a new request, and one that waits for a slot, have none."""
    before = reading(1.0, in_flight=(("old", 10), ("waits", None), ("gone", 5)))
    found = rates(before, reading(3.0, in_flight=(("old", 50), ("waits", 7), ("new", 9))))
    assert found.request_tokens_per_s == {"old": 20.0}
