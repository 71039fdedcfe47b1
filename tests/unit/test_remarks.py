"""What an operator is told: an inert cache, constant routing, restarts; and nothing where all is well."""

from __future__ import annotations

from typing import Any

import pytest

from moe_proxy.remarks import constant_layers, constant_routing, remarks

RECENT = [{"classifier": "keyword", "tokens": 30}] * 3
UNSEEN = [{"classifier": "keyword", "tokens": 0}] * 3


def stats(**changes: Any) -> dict[str, Any]:
    """A healthy proxy after a few answers; a change names a part and what differs in it."""
    healthy: dict[str, Any] = {
        "engine": {"state": "ready", "reason": "", "restarts": 0},
        "requests": {"step_failures": {}},
        "latency": {"duration_s": {"count": 3}},
        "prior": {"map": "m", "pushed": 2, "failed": 0},
        "pager": True,
        "recent": RECENT,
        "experts": {"tokens": 90, "picks": 4000, "hits": 3000, "budget_bytes": 1 << 20, "reasons": []},
    }
    for part, change in changes.items():
        healthy[part] = healthy[part] | change if isinstance(change, dict) else change
    return healthy


def test_a_healthy_proxy_gives_no_reason_to_speak() -> None:
    """A remark is a claim: none without a counter behind it."""
    assert remarks(stats()) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"experts": {"hits": 0}}, "the cache is on and inert: none of 4000 picks was a hit"),
        ({"recent": UNSEEN}, "the pager is on and inert: it counted no token of the last 3 requests"),
        ({"engine": {"restarts": 2}}, "llama-server was restarted, 2 so far"),
        ({"engine": {"state": "crashed", "reason": "killed"}}, "llama-server has crashed: killed"),
        ({"experts": None}, "the pager does not answer"),
        ({"prior": {"pushed": 0, "failed": 4}}, "no prior reached the pager, 4 tries failed"),
        ({"requests": {"step_failures": {"classify": 5}}}, "the step classify failed beside 5 answers"),
    ],
)
def test_warnings(changes: dict[str, Any], says: str) -> None:
    """ "Inert but enabled" must be visible, and so must whatever else costs speed."""
    (remark,) = remarks(stats(**changes))
    assert remark.level == "warn"
    assert says in remark.text


@pytest.mark.parametrize(
    "changes",
    [
        {"experts": {"hits": 0, "picks": 900}},  # too few to say anything
        {"experts": {"hits": 0, "budget_bytes": 0}},  # as it was asked for
        {"experts": {"tokens": 0, "picks": 0, "hits": 0}, "latency": {"duration_s": {"count": 0}}},
        {"experts": None, "engine": {"state": "loading"}},
        {"experts": {"tokens": 0, "picks": 0, "hits": 0}},  # unloaded, and loaded again just now
        {"recent": UNSEEN[:2]},
        {"recent": UNSEEN, "latency": {"duration_s": {"count": 0}}},  # all of them failed
        {"recent": [{"classifier": "", "tokens": 0}] * 9},  # nobody asked the pager about them
    ],
)
def test_no_warning_without_evidence(changes: dict[str, Any]) -> None:
    """It never guesses: a proxy that has just begun is no inert one."""
    assert remarks(stats(**changes)) == []


def test_notes_follow_warnings() -> None:
    """The pager's own reasons, and a missing map, are notes below what has to be acted on."""
    found = remarks(
        stats(experts={"hits": 0, "reasons": ["tiles are off"]}, prior={"map": None}, engine={"restarts": 1})
    )
    assert [remark.level for remark in found] == ["warn", "warn", "note", "note"]
    assert found[2].text == "tiles are off"
    (off,) = remarks(stats(pager=False, experts=None))
    assert (off.level, "pager is off" in off.text) == ("note", True)


def test_constant_routing() -> None:
    """A layer whose tokens all go to the same experts is named, once there are enough of them."""
    same, spread = [0, 500, 500, 0], [250, 250, 250, 250]
    assert constant_layers({"0": same, "1": spread, "2": [0, 10, 10, 0]}, 2) == ["0"]
    assert constant_layers({"0": same}, 4) == []
    assert constant_routing([]) == []
    (remark,) = constant_routing([str(layer) for layer in range(12)])
    assert (remark.level, "in 12 layers (0, 1, 2, 3, 4, 5, 6, 7, …)" in remark.text) == ("warn", True)
