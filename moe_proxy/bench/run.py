"""Owns the order of a benchmark: one engine at a time, arms alternated over rounds, warm-ups first.

It never judges a result and never writes one.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_proxy.bench.arms import Arm
from moe_proxy.bench.sample import Question, Sample, measure
from moe_proxy.bench.texts import Texts
from moe_proxy.completions import ProxyClient
from moe_proxy.errors import EngineError
from moe_proxy.private_proxy import Prepared, private_proxy


@dataclass(frozen=True)
class Schedule:
    """What is measured in each arm: ``runs`` answers of ``tokens`` tokens for each length of prompt.

    The runs are spread over ``rounds``. In each round each arm is started anew and warmed up, in reversed
    order in every other one, so that a machine that grows slower or faster favours none.
    """

    prompt_tokens: tuple[int, ...]
    tokens: int
    runs: int
    warm_ups: int
    rounds: int
    temperature: float
    seed: int

    @property
    def context_length(self) -> int:
        """Tokens of context that the longest prompt and its answer need, with room for what begins a text."""
        return max(self.prompt_tokens) + self.tokens + 64

    def answers(self, arms: int) -> int:
        """How many answers are asked for in all."""
        return arms * len(self.prompt_tokens) * (self.runs + self.rounds * self.warm_ups)


@dataclass(frozen=True)
class Took:
    """A sample of ``arm`` at ``prompt_tokens``; or what starting the arm took, or failed with."""

    arm: str
    prompt_tokens: int | None = None
    sample: Sample | None = None
    load_s: float | None = None
    error: str | None = None


Keep = Callable[[Took], Awaitable[None]]


async def run(
    arms: Sequence[Arm],
    server: Path,
    schedule: Schedule,
    keep: Keep,
    progress: Callable[[str, float], None],
    engine_args: Mapping[str, tuple[str, ...]] | None = None,
) -> None:
    """Measure ``arms`` as ``schedule`` says; ``keep`` is given each thing as soon as it is known.

    ``progress`` is told (arm, share of all answers). ``engine_args`` are more arguments of llama-server, by
    arm. An arm that cannot be started, or breaks, is left out from then on, with its error.
    """
    texts, total, done = Texts(), schedule.answers(len(arms)), 0
    failed: set[str] = set()
    share = len(schedule.prompt_tokens) * schedule.warm_ups
    for number in range(schedule.rounds):
        mine = range(number, schedule.runs, schedule.rounds)
        for arm in arms if number % 2 == 0 else reversed(arms):
            answers = share + len(schedule.prompt_tokens) * len(mine)
            if arm.name in failed:
                done += answers
                continue
            prepared = Prepared(arm.served, server, (engine_args or {}).get(arm.name, ()))
            before = done

            def answered(arm: Arm = arm) -> None:
                nonlocal done
                done += 1
                progress(arm.name, min(done / total, 1.0))

            progress(arm.name, done / total)
            try:
                began = time.perf_counter()
                async with private_proxy(prepared) as client:
                    await keep(Took(arm.name, load_s=time.perf_counter() - began))
                    await _round(client, arm, schedule, mine, texts, keep, answered)
            except EngineError as error:
                failed.add(arm.name)
                await keep(Took(arm.name, error=str(error)))
                done = before + answers


async def _round(
    client: ProxyClient,
    arm: Arm,
    schedule: Schedule,
    mine: range,
    texts: Texts,
    keep: Keep,
    answered: Callable[[], None],
) -> None:
    async def ask(length: int, turn: int) -> Sample:
        text = await texts.text(client, length, turn)
        sample = await measure(
            client, Question(text, schedule.tokens, schedule.temperature, schedule.seed + turn)
        )
        answered()
        return sample

    for turn in range(schedule.warm_ups):
        for length in schedule.prompt_tokens:
            # Other texts than those that are measured.
            await ask(length, schedule.runs + turn)
    for turn in mine:
        for length in schedule.prompt_tokens:
            await keep(Took(arm.name, length, await ask(length, turn)))
