"""Owns one measurement: a prompt that is asked, when its tokens came, what the engine used for it."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from moe_proxy.completions import ProxyClient
from moe_proxy.process_usage import Usage, usage_of


@dataclass(frozen=True)
class Question:
    """What is asked: ``text`` to go on with for ``tokens`` tokens, and how to sample them."""

    text: str
    tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class Sample:
    """What one answer took; None where nobody says.

    Rates are tokens per second as llama-server times them. Seconds are those of the client: until the first
    piece of text, and between pieces (a token each, but for characters of several tokens). ``hits`` of
    ``picks``: expert picks of this answer that were resident. ``disk_bytes`` were read from storage for it.
    """

    prompt_tokens: int
    completion_tokens: int
    prompt_per_s: float | None
    decode_per_s: float | None
    first_token_s: float | None
    token_p50_s: float | None
    token_p95_s: float | None
    hits: int | None
    picks: int | None
    disk_bytes: int | None
    rss_bytes: int | None
    vram_bytes: int | None
    seed: int

    @property
    def hit_rate(self) -> float | None:
        """Share of picks that were resident."""
        return self.hits / self.picks if self.hits is not None and self.picks else None

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


MEDIANS = tuple(field.name for field in fields(Sample) if field.name not in ("seed", "hits", "picks"))
"""What a median is taken of; ``hit_rate`` comes in the place of hits and picks."""


def medians(samples: Sequence[Sample]) -> dict[str, float | None]:
    """The median of each quantity over ``samples``, without those that do not say it."""
    result: dict[str, float | None] = {}
    for name in (*MEDIANS, "hit_rate"):
        values = [value for sample in samples if (value := getattr(sample, name)) is not None]
        result[name] = statistics.median(values) if values else None
    return result


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest of ``values`` that ``share`` of them do not exceed (nearest rank); None of none."""
    if not values:
        return None
    ranked = sorted(values)
    return ranked[max(0, -int(-share * len(ranked) // 1) - 1)]


async def measure(client: ProxyClient, question: Question) -> Sample:
    """Ask ``question`` and watch. Raises what the proxy answers, EngineGoneError when it breaks off."""
    before = await _state(client)
    began = time.perf_counter()
    came: list[float] = []
    parameters = {
        "max_tokens": question.tokens,
        "temperature": question.temperature,
        "seed": question.seed,
        "ignore_eos": True,
        # Each prompt is computed whole, whatever was asked before.
        "cache_prompt": False,
    }
    async with await client.stream(question.text, None, parameters) as stream:
        async for _ in stream:
            came.append(time.perf_counter())
        answer = stream.completion
    after = await _state(client)
    between = [later - earlier for earlier, later in itertools.pairwise(came)]
    return Sample(
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        prompt_per_s=answer.prompt_per_s,
        decode_per_s=answer.decode_per_s,
        first_token_s=came[0] - began if came else None,
        token_p50_s=percentile(between, 0.5),
        token_p95_s=percentile(between, 0.95),
        hits=_difference(before.hits, after.hits),
        picks=_difference(before.picks, after.picks),
        disk_bytes=_difference(before.usage.read_bytes, after.usage.read_bytes),
        rss_bytes=after.usage.rss_bytes,
        vram_bytes=after.usage.vram_bytes,
        seed=question.seed,
    )


@dataclass(frozen=True)
class _State:
    hits: int | None
    picks: int | None
    usage: Usage


async def _state(client: ProxyClient) -> _State:
    stats = await client.get("/stats")
    experts = stats.get("experts") or {}
    usage = await asyncio.to_thread(usage_of, int(stats["engine"]["pid"]))
    return _State(experts.get("hits"), experts.get("picks"), usage)


def _difference(before: int | None, after: int | None) -> int | None:
    return after - before if before is not None and after is not None else None
