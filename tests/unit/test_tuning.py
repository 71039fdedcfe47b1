"""The search for what serves best: what is tried, and who wins by how much."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from moe_proxy import tuning
from moe_proxy.bench.arms import Arm
from moe_proxy.bench.run import Schedule, Took
from moe_proxy.bench.sample import Sample
from moe_proxy.config import load_settings
from moe_proxy.errors import EngineError
from moe_proxy.tuning import Effort, Way, answer_s, judged, thread_counts, tune

EFFORT = Effort(prompt_tokens=100, tokens=50, runs=2)


def sample(seconds: float, seed: int = 1) -> Sample:
    """An answer of 50 tokens after 100 that took so long, a third of it for the prompt."""
    names = Sample.__dataclass_fields__
    speeds = {"prompt_per_s": 100 / (seconds / 3), "decode_per_s": 50 / (seconds * 2 / 3)}
    facts = {"prompt_tokens": 100, "completion_tokens": 50, "seed": seed, **speeds}
    return Sample(**(dict.fromkeys(names) | facts))  # type: ignore[arg-type]


class Engines:
    """Stands for engines: ``seconds`` says how long an answer takes in each way; None: it does not start."""

    def __init__(self, seconds: Callable[[str], float | None]) -> None:
        self.seconds = seconds
        self.tried: list[list[str]] = []
        self.served: dict[str, Any] = {}

    async def run(
        self, arms: Sequence[Arm], server: Path, schedule: Schedule, keep: Any, progress: Any
    ) -> None:
        """In the place of bench.run.run."""
        self.tried.append([arm.name for arm in arms])
        for arm in arms:
            self.served[arm.name] = arm.served
            seconds = self.seconds(arm.name)
            if seconds is None:
                await keep(Took(arm.name, error="it does not start"))
                continue
            for seed in range(schedule.runs):
                await keep(Took(arm.name, schedule.prompt_tokens[0], sample(seconds, seed)))
            progress(arm.name, 1.0)


@pytest.fixture
def settings(own_folders: None, planted_model: Path) -> Any:
    """Of the planted model."""
    return load_settings({"model": planted_model})


def _engines(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[str], float | None]) -> Engines:
    engines = Engines(seconds)
    monkeypatch.setattr(tuning, "run", engines.run)
    monkeypatch.setattr(tuning, "thread_counts", lambda cores, logical: (1, 2, 4))
    return engines


def _seconds(pager: float, stock: float) -> Callable[[str], float]:
    """Four sleeping threads are best, spinning ones worst; else more threads are better."""

    def of(name: str) -> float:
        base = pager if name.startswith("pager") else stock
        if "4 threads" in name:
            return base if "sleeping" in name else base * 9
        return base * (2 if "2 threads" in name else 3)

    return of


@pytest.mark.parametrize(
    ("cores", "logical", "counts"),
    [(1, 1, (1,)), (2, 4, (1, 2, 4)), (4, 4, (1, 2, 3, 4)), (8, 16, (2, 4, 6, 7, 8, 16))],
)
def test_numbers_of_threads(cores: int, logical: int, counts: tuple[int, ...]) -> None:
    """1 to all cores where they are few, some of them where they are many, and hardware threads."""
    assert thread_counts(cores, logical) == counts


@pytest.mark.parametrize(
    ("stock", "pager_wins"), [(1.2, True), (1.0, True), (0.985, True), (0.975, False), (0.5, False)]
)
async def test_stock_is_chosen_when_it_wins_by_more_than_two_percent(
    settings: Any, monkeypatch: pytest.MonkeyPatch, stock: float, pager_wins: bool
) -> None:
    """Never slower than stock: stock is chosen when it wins by more than 2 %, and not before."""
    engines = _engines(monkeypatch, _seconds(1.0, stock))
    tuned = await tune(settings, Path("/bin/false"), EFFORT, lambda _stage, _share: None)
    best = tuned.choice.trial
    assert (best.threads, best.patient, best.pager) == (4, True, pager_wins)
    assert best.answer_s == pytest.approx(1.0 if pager_wins else stock)
    assert ("pager:" in tuned.choice.reason) is pager_wins
    assert engines.tried[-1] == ["pager, 4 threads sleeping", "stock, 4 threads sleeping"]
    assert best in tuned.trials and len(tuned.trials) >= 6


async def test_each_way_is_served_as_it_says(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads, how they wait, and pager reach the engine; nothing that was found before does."""
    engines = _engines(monkeypatch, _seconds(1.0, 1.0))
    await tune(settings, Path("/bin/false"), EFFORT, lambda _stage, _share: None)
    served = engines.served["stock, 4 threads sleeping"].settings
    assert (served.threads, served.thread_wait, served.pager) == (4, "sleep", False)
    assert (served.calibrated, served.slots) == (False, 1)
    served = engines.served["pager, 2 threads spinning"].settings
    assert (served.threads, served.thread_wait, served.pager) == (2, "spin", True)


async def test_a_ram_budget_is_the_pagers_to_keep(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a RAM budget is asked for, stock is no choice, however fast: it would not keep to it."""
    engines = _engines(monkeypatch, _seconds(1.0, 0.1))
    budgeted = settings.model_copy(update={"ram_budget": "40%"})
    tuned = await tune(budgeted, Path("/bin/false"), EFFORT, lambda _stage, _share: None)
    assert tuned.choice.trial.pager
    assert not [name for names in engines.tried for name in names if name.startswith("stock")]


async def test_ways_that_fail_are_no_choice(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A way that cannot be started is left out; when none can, the error says why."""
    seconds = _seconds(1.0, 1.5)
    _engines(monkeypatch, lambda name: None if "4 threads" in name else seconds(name))
    tuned = await tune(settings, Path("/bin/false"), EFFORT, lambda _stage, _share: None)
    assert tuned.choice.trial.threads == 2
    _engines(monkeypatch, lambda _name: None)
    with pytest.raises(EngineError, match="it does not start"):
        await tune(settings, Path("/bin/false"), EFFORT, lambda _stage, _share: None)


def test_answers_to_the_same_are_compared() -> None:
    """The median of the ratios of answers with the same seed: one slow moment decides nothing."""
    paged = [sample(1.0, 1), sample(2.0, 2), sample(30.0, 3)]
    stock = [sample(1.0, 1), sample(2.0, 2), sample(3.0, 3)]
    assert judged(paged, stock) == pytest.approx(1.0)
    assert answer_s(paged[1]) == pytest.approx(2.0)


def test_a_way_in_words() -> None:
    """As the table has it."""
    assert Way(1, True, False).name == "stock, 1 thread sleeping"
