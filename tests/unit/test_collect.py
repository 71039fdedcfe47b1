"""Collecting: labelled prompts in, a router map out."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from moe_proxy.domains.base import DOMAINS
from moe_proxy.errors import ControlError, EngineGoneError
from moe_proxy.routing.collect import builtin_prompts, collect, held_out_prompts
from moe_proxy.routing.router_map import ModelKey, dump, parse

KEY = ModelKey("qwen3moe", "tiny", "ab" * 32, (0, 2), 3, 1)


class Engine:
    """Counts one token per word; every token picks the expert of its length, modulo 3."""

    def __init__(self) -> None:
        self.answered: dict[str, str] = {}

    async def complete(self, text: str, request_id: str) -> None:
        """Remember the prompt of the request."""
        assert request_id not in self.answered
        self.answered[request_id] = text

    async def usage(self, request_id: str) -> Mapping[str, object]:
        """What the prompt's words picked."""
        words = self.answered[request_id].split()
        row = [sum(len(word) % 3 == expert for word in words) for expert in range(3)]
        return {"tokens": len(words), "layers": {"0": row, "2": row}, "picks": 2 * len(words)}


async def test_counts_are_added_up_by_domain() -> None:
    """The counts of each request go to the domain that its prompt is labelled with."""
    seen: list[tuple[int, int]] = []
    found = await collect(
        Engine(),
        {"math": ["a bb", "ccc"], "logic": ["dddd"], "debug": []},
        KEY,
        made={"tool": "test"},
        progress=lambda done, total: seen.append((done, total)),
    )
    assert found.domains["math"].tokens == 3
    assert found.domains["math"].layers == {0: (1, 1, 1), 2: (1, 1, 1)}
    assert found.domains["logic"].layers[0] == (0, 1, 0)
    assert found.domains["debug"].layers[0] == (0, 0, 0)
    assert found.made == {"tool": "test", "tokens": 4}
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert parse(dump(found), "test") == found


@pytest.mark.parametrize(
    ("usage", "words"),
    [
        ({}, "tokens is None"),
        ({"tokens": -1}, "tokens is -1"),
        ({"tokens": 1, "layers": []}, "2 MoE layers"),
        ({"tokens": 1, "layers": {"0": [1, 0, 0]}}, "2 MoE layers"),
        ({"tokens": 1, "layers": {"0": [1, 0, 0], "2": [1, 0]}}, "layer 2 is not 3 counts"),
        ({"tokens": 1, "layers": {"0": [1, 0, -1], "2": [1, 0, 0]}}, "layer 0"),
        ({"tokens": 1, "layers": {"0": [1, 0, 0.5], "2": [1, 0, 0]}}, "layer 0"),
    ],
)
async def test_counts_that_do_not_fit_are_refused(usage: dict[str, object], words: str) -> None:
    """Counts of another model never get into a map."""

    class Broken(Engine):
        async def usage(self, request_id: str) -> Mapping[str, object]:
            return usage

    with pytest.raises(ControlError, match=words):
        await collect(Broken(), {"math": ["a"]}, KEY, made={})


async def test_an_engine_that_dies_ends_collecting() -> None:
    """An engine's own error is not swallowed: half a map is none."""

    class Dying(Engine):
        async def complete(self, text: str, request_id: str) -> None:
            raise EngineGoneError("gone")

    with pytest.raises(EngineGoneError):
        await collect(Dying(), {"math": ["a"]}, KEY, made={})


def test_shipped_prompts() -> None:
    """Each domain has prompts to collect from and others that are held out."""
    used, held = builtin_prompts(), held_out_prompts()
    assert tuple(used) == tuple(held) == DOMAINS
    for domain in DOMAINS:
        assert len(used[domain]) >= 6
        assert len(held[domain]) >= 6
        assert all(prompt.strip() == prompt and prompt for prompt in used[domain] + held[domain])
    everything = [prompt for half in (used, held) for prompts in half.values() for prompt in prompts]
    assert len(set(everything)) == len(everything)
