"""Owns the search for what serves a model best on this machine: threads, how they wait, pager or stock.

Everything is judged by real serving. It writes nothing and prints nothing.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moe_proxy.bench.arms import Arm
from moe_proxy.bench.run import Schedule, Took, run
from moe_proxy.bench.sample import Sample
from moe_proxy.calibration import Choice, Trial
from moe_proxy.config import Settings
from moe_proxy.errors import EngineError
from moe_proxy.served import Served, examine

MARGIN = 0.02
"""Stock llama.cpp is chosen when its answers take less time by more than this share."""


@dataclass(frozen=True)
class Effort:
    """How much is measured of each way to serve: ``runs`` answers of ``tokens`` after ``prompt_tokens``."""

    prompt_tokens: int = 256
    tokens: int = 64
    runs: int = 4
    warm_ups: int = 1

    def schedule(self, rounds: int) -> Schedule:
        """In so many rounds."""
        rounds = min(rounds, self.runs)
        return Schedule(
            (self.prompt_tokens,), self.tokens, self.runs, self.warm_ups, rounds, temperature=0.8, seed=1
        )


@dataclass(frozen=True)
class Way:
    """One way to serve."""

    threads: int
    patient: bool
    pager: bool

    @property
    def name(self) -> str:
        """In words."""
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        wait = "sleeping" if self.patient else "spinning"
        return f"{'pager' if self.pager else 'stock'}, {threads} {wait}"


@dataclass(frozen=True)
class Tuned:
    """The choice, and all that was measured for it."""

    choice: Choice
    trials: tuple[Trial, ...]


def thread_counts(cores: int, logical: int) -> tuple[int, ...]:
    """How many threads are worth a trial on ``cores`` cores with ``logical`` hardware threads."""
    if cores <= 4:
        counts = set(range(1, cores + 1))
    else:
        counts = {cores // 4, cores // 2, 3 * cores // 4, cores - 1, cores}
    return tuple(sorted(counts | ({logical} if logical > cores else set())))


def answer_s(sample: Sample) -> float:
    """Seconds of prompt and answer as the engine timed them. Raises EngineError when it did not."""
    if not sample.prompt_per_s or not sample.decode_per_s:
        raise EngineError("llama-server does not time its answers", "tune with moe-proxy's own build")
    return sample.prompt_tokens / sample.prompt_per_s + sample.completion_tokens / sample.decode_per_s


def judged(paged: Sequence[Sample], stock: Sequence[Sample]) -> float:
    """How much longer an answer takes with the pager than without: the median ratio of answers to the same.

    1.05 is 5 % longer.
    """
    by_seed = {sample.seed: sample for sample in stock}
    return statistics.median(
        answer_s(sample) / answer_s(by_seed[sample.seed]) for sample in paged if sample.seed in by_seed
    )


class _Search:
    """The trials so far."""

    def __init__(
        self, settings: Settings, server: Path, effort: Effort, progress: Callable[[str, float], None]
    ) -> None:
        # What is asked for is measured as it is, whatever was found before.
        plain = settings.model_copy(update={"calibrated": False})
        self._served = {pager: examine(plain.model_copy(update={"pager": pager})) for pager in (True, False)}
        self._server = server
        self._effort = effort
        self._progress = progress
        self.samples: dict[Way, list[Sample]] = {}
        self.errors: list[str] = []

    @property
    def hardware_threads(self) -> tuple[int, ...]:
        """Numbers of threads to try."""
        return thread_counts(self._served[True].hardware.cores_physical, len(os.sched_getaffinity(0)))

    async def measure(
        self, ways: Iterable[Way], stage: str, share: tuple[float, float], rounds: int = 1
    ) -> None:
        """Measure ``ways`` beside each other; what was known of them is forgotten."""
        named = {way.name: way for way in ways}
        for way in named.values():
            self.samples.pop(way, None)

        async def keep(took: Took) -> None:
            if took.sample is not None:
                self.samples.setdefault(named[took.arm], []).append(took.sample)
            if took.error is not None:
                self.samples.pop(named[took.arm], None)
                self.errors.append(f"{took.arm}: {took.error}")

        first, last = share
        await run(
            [self._arm(way) for way in named.values()],
            self._server,
            self._effort.schedule(rounds),
            keep,
            lambda arm, part: self._progress(f"{stage}: {arm}", first + (last - first) * part),
        )

    def best(self, ways: Iterable[Way]) -> Way:
        """Whose answers took the least time. Raises EngineError when none could be measured."""
        measured = [way for way in ways if way in self.samples]
        if not measured:
            raise EngineError(
                "no way to serve could be measured", self.errors[-1] if self.errors else "see moe-proxy logs"
            )
        return min(measured, key=self._median_s)

    def trial(self, way: Way) -> Trial:
        """Medians of one way."""
        samples = self.samples[way]
        return Trial(
            way.threads,
            way.patient,
            way.pager,
            prompt_per_s=statistics.median(sample.prompt_per_s or 0.0 for sample in samples),
            decode_per_s=statistics.median(sample.decode_per_s or 0.0 for sample in samples),
            answer_s=self._median_s(way),
        )

    def _median_s(self, way: Way) -> float:
        return statistics.median(map(answer_s, self.samples[way]))

    def _arm(self, way: Way) -> Arm:
        served: Served = self._served[way.pager]
        changes = {
            "threads": way.threads,
            "thread_wait": "sleep" if way.patient else "spin",
            "context_length": self._effort.schedule(1).context_length,
            "slots": 1,
            "learn": False,
        }
        settings = served.settings.model_copy(update=changes)
        return Arm(way.name, "paged" if way.pager else "stock", None, replace(served, settings=settings))


async def tune(
    settings: Settings,
    server: Path,
    effort: Effort,
    progress: Callable[[str, float], None],
) -> Tuned:
    """What serves the model of ``settings`` best under their budgets.

    First numbers of threads with the pager, then whether they better sleep while they wait, then stock with
    the best number and the largest, then the best of both; what decides is measured in alternation. Where a
    RAM budget is asked for, stock is not tried: it knows none. Raises EngineError when nothing could be
    measured, and as ``examine`` does.
    """
    search = await asyncio.to_thread(_Search, settings, server, effort, progress)
    counts = search.hardware_threads
    spinning = [Way(count, False, True) for count in counts]
    await search.measure(spinning, "threads", (0.0, 0.3))
    best = search.best(spinning)
    # Spinning costs most where all cores compute: that is where sleeping may win.
    waits = dict.fromkeys((best, replace(best, patient=True), Way(counts[-1], True, True)))
    await search.measure(waits, "waiting", (0.3, 0.5), rounds=2)
    best = search.best(waits)
    if settings.ram_budget is not None and not settings.gpu:
        return _tuned(search, best, "stock was not tried: it keeps to no RAM budget")
    rivals = dict.fromkeys(Way(count, best.patient, False) for count in (best.threads, counts[-1]))
    await search.measure(rivals, "stock", (0.5, 0.7))
    rival = search.best(rivals)
    await search.measure([best, rival], "beside each other", (0.7, 1.0), rounds=2)
    if best not in search.samples or rival not in search.samples:
        raise EngineError("an engine failed in the last comparison", search.errors[-1])
    longer = judged(search.samples[best], search.samples[rival]) - 1
    said = f"{abs(longer):.1%} {'longer' if longer > 0 else 'less'} than with stock llama.cpp"
    if longer > MARGIN:
        return _tuned(search, rival, f"stock: with the pager an answer takes {said}")
    return _tuned(search, best, f"pager: an answer takes {said}")


def _tuned(search: _Search, way: Way, reason: str) -> Tuned:
    return Tuned(Choice(search.trial(way), reason), tuple(search.trial(each) for each in search.samples))
