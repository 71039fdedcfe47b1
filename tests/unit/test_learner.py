"""Learning: attributed counts become the map, old ones fade, nothing is lost by a restart."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_proxy.errors import RouterMapError
from moe_proxy.learning import Learning, learned_path
from moe_proxy.routing.active import ActiveRequests
from moe_proxy.routing.learner import Learner
from moe_proxy.routing.router_map import dump, parse
from tests.support.surface import eventually
from tests.unit.test_router_map import KEY, MAP

SHAPE = (2, 4)


def _counts(*rows: list[int]) -> npt.NDArray[np.int64]:
    return np.array(rows, np.int64)


TEN = _counts([10, 0, 10, 0], [0, 20, 0, 0])


def _learner(half_life_tokens: float = 100.0) -> Learner:
    return Learner(KEY, MAP, half_life_tokens)


def test_without_learning_the_shipped_map_stands() -> None:
    """Nothing learned: the shipped map itself; no shipped map: none."""
    assert _learner().merged() is MAP
    assert Learner(KEY, None, 100.0).merged() is None


def test_counts_are_added_by_weight() -> None:
    """A request's counts go to its domains, weighted by its distribution; others stay."""
    learner = _learner(1e12)
    assert learner.learn({"codegen": 0.5, "math": 0.5}, 10, TEN)
    merged = learner.merged()
    assert merged is not None
    assert merged.domains["codegen"].layers == {1: (15, 5, 8, 2), 3: (5, 15, 5, 5)}
    assert merged.domains["math"].layers == {1: (5, 0, 5, 0), 3: (0, 10, 0, 0)}
    assert merged.domains["größe 中"] == MAP.domains["größe 中"]
    assert parse(dump(merged), "merged") == merged


def test_half_life_in_tokens() -> None:
    """After a half-life of tokens, what was there counts half, the shipped counts too."""
    learner = _learner(100.0)
    learner.learn({"codegen": 1.0}, 100, _counts([0] * 4, [0] * 4))
    merged = learner.merged()
    assert merged is not None
    assert merged.domains["codegen"].layers[1] == (5, 2, 2, 1)
    assert learner.tokens["codegen"] == 100
    learner.learn({"codegen": 1.0}, 100, _counts([0] * 4, [0] * 4))
    assert learner.tokens["codegen"] == pytest.approx(150)


@pytest.mark.parametrize(("distribution", "tokens"), [({}, 10), ({"math": 1.0}, 0), ({"math": 0.001}, 10)])
def test_nothing_to_learn(distribution: dict[str, float], tokens: int) -> None:
    """An abstention, no tokens, a softmax's tail: nothing is learned."""
    learner = _learner()
    assert not learner.learn(distribution, tokens, TEN)
    assert learner.merged() is MAP


@given(
    st.lists(
        st.tuples(
            st.dictionaries(
                st.sampled_from(["codegen", "math", "own 标签"]), st.floats(0.01, 1.0), max_size=3
            ),
            st.integers(1, 5000),
            st.lists(st.integers(0, 10**6), min_size=8, max_size=8),
        ),
        max_size=6,
    )
)
def test_persistence_is_exact(requests: list[tuple[dict[str, float], int, list[int]]]) -> None:
    """After a restart the counts are what they were, to the last bit."""
    learner = _learner()
    for distribution, tokens, counts in requests:
        learner.learn(distribution, tokens, np.array(counts, np.int64).reshape(SHAPE))
    again = _learner()
    again.restore(learner.dump(), "file")
    assert again.dump() == learner.dump()
    assert again.merged() == learner.merged()


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(format="x"),
        lambda d: d.update(fingerprint="cd" * 32),
        lambda d: d.update(domains=[]),
        lambda d: d["domains"]["math"].update(tokens=-1),
        lambda d: d["domains"]["math"].update(tokens=True),
        lambda d: d["domains"]["math"].pop("shipped_share"),
        lambda d: d["domains"]["math"]["layers"].pop("3"),
        lambda d: d["domains"]["math"]["layers"].update({"3": [1, 2]}),
        lambda d: d["domains"]["math"]["layers"].update({"3": [1, 2, 3, "x"]}),
        lambda d: d["domains"]["math"]["layers"].update({"3": [1, 2, 3, -1]}),
        lambda d: d["domains"]["math"]["layers"].update({"3": [1, 2, 3, float("nan")]}),
    ],
)
def test_a_damaged_state_is_refused(change: object) -> None:
    """A damaged state is refused with its name, and what was there stays."""
    learner = _learner()
    learner.learn({"math": 1.0}, 10, TEN)
    before = learner.dump()
    document = json.loads(before)
    change(document)  # type: ignore[operator]
    with pytest.raises(RouterMapError, match=r"learned\.json"):
        learner.restore(json.dumps(document), "learned.json")
    assert learner.dump() == before


def _usage(tokens: int = 10) -> dict[str, object]:
    return {"tokens": tokens, "layers": {"1": [10, 0, 10, 0], "3": [0, 20, 0, 0]}}


def _active() -> ActiveRequests:
    return ActiveRequests(MAP, kappa=8.0, min_distance=0.0)


async def test_a_restart_keeps_what_was_learned(tmp_path: Path) -> None:
    """Learned in one run, there in the next, and it moves the prior of both."""
    path = learned_path(tmp_path, KEY.fingerprint)
    first, active = _learner(), _active()
    before = active.begin("1", {"codegen": 1.0})
    async with Learning(first, active, path) as learning:
        learning.learn({"codegen": 1.0}, _usage())
    assert active.begin("2", {"codegen": 1.0}) not in (None, before)
    second = _learner()
    async with Learning(second, _active(), path) as learning:
        assert second.dump() == first.dump()
        assert learning.report()["tokens"] == {"codegen": 10.0}


async def test_reset_while_running(tmp_path: Path) -> None:
    """Removing the file forgets, in a running proxy too."""
    path = learned_path(tmp_path, KEY.fingerprint)
    learner = _learner()
    async with Learning(learner, _active(), path) as learning:
        learning.learn({"codegen": 1.0}, _usage())
    async with Learning(learner, _active(), path) as learning:
        path.unlink()
        learning.learn({"math": 1.0}, _usage())
        assert set(learner.tokens) == {"math"}


async def test_a_directory_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A read-only data directory gives one warning and no storm."""
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        learning = Learning(_learner(), _active(), tmp_path / "file" / "learned.json", save_delay_s=0.0)
        for _ in range(5):
            learning.learn({"codegen": 1.0}, _usage())
            learning._file.write(b"{}")
    assert len(caplog.records) == 1
    assert "cannot be written" in caplog.text


async def test_damage_and_misfits_fail_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged file is left aside with a warning; counts of another shape are not learned."""
    path = tmp_path / "learned.json"
    path.write_text("{", encoding="utf-8")
    learner = _learner()
    async with Learning(learner, _active(), path) as learning:
        learning.learn({"codegen": 1.0}, {"tokens": 3, "layers": {}})
        assert learning.refused == 1
    assert learner.merged() is MAP
    assert "not used" in caplog.text


async def test_a_map_is_not_made_for_every_request(tmp_path: Path) -> None:
    """Of many requests that end in a second the first moves the map, and what they all used is not lost."""
    now_s = 100.0
    learner, active = _learner(), _active()
    used = []
    active.use = used.append  # type: ignore[method-assign]
    async with Learning(
        learner, active, tmp_path / "learned.json", save_delay_s=0.0, clock_s=lambda: now_s
    ) as learning:
        used.clear()
        for _ in range(50):
            learning.learn({"codegen": 1.0}, _usage())
        assert len(used) == 1
        now_s += 1.0
        learning.learn({"codegen": 1.0}, _usage())
        assert len(used) == 2
        learning.learn({"codegen": 1.0}, _usage())
        await eventually(lambda: len(used) == 3)
        assert used[-1] == learner.merged()
