"""What is known of requests; what fails here never fails a request."""

from __future__ import annotations

from typing import Any

import pytest

from moe_proxy.activity import IN_FLIGHT_SHOWN, RECENT_REQUESTS, Activity
from moe_proxy.domains.base import Classification
from moe_proxy.errors import EngineGoneError
from moe_proxy.routing.active import ActiveRequests
from tests.support.surface import eventually
from tests.unit.test_active import MAP

CODE = Classification({"codegen": 0.9, "math": 0.1}, "keyword")
MATH = Classification({"math": 1.0}, "keyword")


class Feed:
    """Remembers what it was offered."""

    def __init__(self) -> None:
        self.offered: list[Any] = []

    def offer(self, prior: Any) -> None:
        """Remember."""
        self.offered.append(prior)


class Control:
    """Answers usage, or fails."""

    def __init__(self, answer: dict[str, Any] | None) -> None:
        self.answer = answer

    async def usage(self, *, request: str) -> dict[str, Any]:
        """The prepared answer."""
        if self.answer is None:
            raise EngineGoneError("gone")
        return self.answer


def _activity(answer: dict[str, Any] | None) -> tuple[Activity, Feed]:
    feed = Feed()
    active = ActiveRequests(MAP, kappa=8.0, min_distance=0.05)
    return Activity(active, feed, Control(answer), clock_s=lambda: 1.0), feed  # type: ignore[arg-type]


async def test_a_request_pushes_a_prior_and_leaves_its_counts() -> None:
    """Its domain becomes a prior at the beginning; its attributed counts are read at the end."""
    activity, feed = _activity({"tokens": 5, "picks": 20, "hits": 12, "layers": {}})
    activity.begin("1", "/v1/chat/completions", CODE)
    assert [prior.id for prior in feed.offered] == [activity.prior.id if activity.prior else ""]
    await activity.end("1")
    (request,) = activity.recent()
    assert (request["domain"], request["tokens"], request["picks"], request["hits"]) == ("codegen", 5, 20, 12)
    assert request["prior"] == feed.offered[0].id


async def test_a_crowd_of_requests_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of many moves the prior at once; those that follow move it together, a moment later."""
    monkeypatch.setattr("moe_proxy.activity._LOOK_INTERVAL_S", 0.02)
    activity, feed = _activity(None)
    alone = ActiveRequests(MAP, kappa=8.0, min_distance=0.05)
    assert alone.begin("0", CODE.distribution) is not None
    activity.begin("0", "/api/chat", CODE)
    for number in range(1, 9):
        activity.begin(str(number), "/api/chat", MATH)
        alone.add(str(number), MATH.distribution)
    assert len(feed.offered) == 1
    await eventually(lambda: len(feed.offered) == 2)
    assert feed.offered[1] == alone.moved()


async def test_nothing_is_looked_at_after_the_end() -> None:
    """What was to be looked at a moment later is not, once the proxy ends."""
    activity, _ = _activity(None)
    activity.begin("0", "/api/chat", CODE)
    activity.begin("1", "/api/chat", MATH)
    assert activity._look is not None
    activity.close()
    assert activity._look.cancelled()


async def test_an_engine_that_is_gone_is_counted() -> None:
    """A failure is counted and never reaches the client."""
    activity, _ = _activity(None)
    activity.begin("1", "/api/chat", CODE)
    await activity.end("1")
    assert activity.uncounted == 1
    assert activity.recent()[0]["picks"] == 0


async def test_a_request_without_text_moves_nothing() -> None:
    """No text, no classification: no prior, and the pager is not asked."""
    activity, feed = _activity(None)
    activity.begin("1", "/v1/embeddings", None)
    await activity.end("1")
    await activity.end("1")
    assert (feed.offered, activity.uncounted) == ([], 0)
    assert len(activity.recent()) == 1


async def test_memory_is_bounded() -> None:
    """Only the last requests are kept."""
    activity, _ = _activity({"tokens": 1, "picks": 4, "hits": 0, "layers": {}})
    for number in range(RECENT_REQUESTS + 5):
        activity.begin(str(number), "/api/chat", CODE)
        await activity.end(str(number))
    assert [request["id"] for request in activity.recent()] == [str(n) for n in range(5, RECENT_REQUESTS + 5)]


async def test_without_a_pager_nobody_is_asked() -> None:
    """With the pager off, a request costs no call of the control API and misses no counts."""
    active = ActiveRequests(None, kappa=8.0, min_distance=0.05)
    activity = Activity(active, Feed(), None, clock_s=lambda: 1.0)  # type: ignore[arg-type]
    activity.begin("1", "/api/chat", CODE)
    await activity.end("1")
    assert activity.uncounted == 0
    assert activity.recent()[0]["domain"] == "codegen"


async def test_requests_in_flight_tell_their_tokens() -> None:
    """Who runs, how long, of which domain, and how far it is; one that waits for a slot has no number."""
    now_s = 10.0
    control = Control({"tokens": 7, "layers": {}})
    active = ActiveRequests(MAP, kappa=8.0, min_distance=0.05)
    activity = Activity(active, Feed(), control, clock_s=lambda: now_s)  # type: ignore[arg-type]
    activity.begin("1", "/v1/chat/completions", CODE)
    activity.begin("2", "/api/generate", None)
    now_s = 12.5
    first, second = await activity.in_flight()
    assert (first["id"], first["domain"], first["seconds"], first["tokens"]) == ("1", "codegen", 2.5, 7)
    assert (second["path"], second["domain"]) == ("/api/generate", None)
    control.answer = None
    assert [request["tokens"] for request in await activity.in_flight()] == [None, None]
    await activity.end("1")
    assert [request["id"] for request in await activity.in_flight()] == ["2"]


async def test_the_list_of_requests_in_flight_is_bounded() -> None:
    """The engine is asked about so many of them and no more."""
    activity, _ = _activity({"tokens": 1, "layers": {}})
    for number in range(IN_FLIGHT_SHOWN + 5):
        activity.begin(str(number), "/api/chat", None)
    assert [request["id"] for request in await activity.in_flight()] == [
        str(n) for n in range(IN_FLIGHT_SHOWN)
    ]
