"""Maps and attribution on the real engine: collected halves, concurrent requests, a quick A, B, A."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from moe_proxy.engine.build import EngineBuild
from moe_proxy.engine.control import EngineControl, PriorFeed
from moe_proxy.model.gguf_header import read_header
from moe_proxy.model.layout import layout_of
from moe_proxy.resources import data_path
from moe_proxy.routing.active import ActiveRequests
from moe_proxy.routing.collect import builtin_prompts, collect, held_out_prompts
from moe_proxy.routing.router_map import ModelKey, RouterMap, load
from tests.support.engine_process import engine_process
from tests.support.text import call

pytestmark = pytest.mark.engine

DOMAINS = ("codegen", "math", "creative_write", "chinese_tech")


class Runner:
    """A CollectEngine on a bare llama-server that asks as ``moe-proxy collect`` does: a chat of one turn."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket

    async def complete(self, text: str, request_id: str) -> None:
        """A greedy answer."""
        messages = [{"role": "user", "content": text}]
        body = {"messages": messages, "max_tokens": 48, "temperature": 0, "cache_prompt": False}
        headers = {"X-Moe-Request": request_id}
        await asyncio.to_thread(call, self.socket, "POST", "/v1/chat/completions", body, headers)

    async def usage(self, request_id: str) -> Mapping[str, object]:
        """Its counts."""
        return _usage(self.socket, request_id)


def _complete(socket: Path, text: str, request_id: str) -> None:
    body = {
        "prompt": text,
        "n_predict": 16,
        "temperature": 0,
        "cache_prompt": False,
        "ignore_eos": True,
    }
    call(socket, "POST", "/completion", body, {"X-Moe-Request": request_id})


def _usage(socket: Path, request_id: str) -> dict[str, Any]:
    usage: dict[str, Any] = call(socket, "GET", f"/experts/usage?request={request_id}")
    return usage


def _log_likelihood(p: npt.NDArray[np.float64], counts: npt.NDArray[np.int64]) -> float:
    """Mean log-probability of a pick, with ``p`` scaled to add up to 1 per layer."""
    logs = np.log(p / p.sum(axis=1, keepdims=True))
    return float((logs * counts).sum() / counts.sum())


def test_one_half_predicts_the_other(engine: EngineBuild, planted_model: Path) -> None:
    """A map made by ``collect`` from one half of labelled prompts predicts the other half's routing better.

    Better than the all-domains average does: log-likelihood, for each domain, whichever half it is made from.
    """
    key = ModelKey.of(layout_of(read_header(planted_model)))

    def collected(socket: Path, prompts: Mapping[str, Sequence[str]]) -> RouterMap:
        return asyncio.run(collect(Runner(socket), prompts, key, made={}))

    with engine_process(engine.server, planted_model, MOE_PAGER="1") as socket:
        halves = collected(socket, builtin_prompts()), collected(socket, held_out_prompts())
    for first, second in (halves, halves[::-1]):
        average = first.pick_probabilities.mean(axis=0)
        for (label, counts), predicted in zip(second.counts.items(), first.pick_probabilities, strict=True):
            assert _log_likelihood(predicted, counts) > _log_likelihood(average, counts), label


def test_sixteen_concurrent_requests(engine: EngineBuild, planted_model: Path) -> None:
    """Sixteen concurrent requests of four domains are attributed as when each runs alone."""
    prompts = {
        f"{domain}-{number}": text
        for domain in DOMAINS
        for number, text in enumerate((held_out_prompts()[domain] + builtin_prompts()[domain])[:4])
    }
    assert len(prompts) == 16
    slots = ("--parallel", "16", "--ctx-size", "16384")
    with engine_process(engine.server, planted_model, *slots, MOE_PAGER="1") as socket:
        for name, text in prompts.items():
            _complete(socket, text, f"alone-{name}")
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda item: _complete(socket, item[1], f"together-{item[0]}"), prompts.items()))
        for name in prompts:
            together, alone = (_usage(socket, f"{how}-{name}") for how in ("together", "alone"))
            # What was resident at the time is not the request's own affair.
            assert {**together, "hits": 0} == {**alone, "hits": 0}, name


async def test_a_b_a_ends_on_a(engine: EngineBuild, planted_model: Path) -> None:
    """A, B, A within a second ends on A."""
    active = ActiveRequests(load(data_path("maps") / "planted-moe.json"), kappa=256.0, min_distance=0.05)
    with engine_process(engine.server, planted_model, MOE_PAGER="1") as socket:
        async with EngineControl(socket) as control, PriorFeed(control) as feed:
            wanted = ""
            for number, domain in enumerate(("codegen", "creative_write", "codegen")):
                request = str(number)
                prior = active.begin(request, {domain: 1.0})
                if prior is not None:
                    wanted = prior.id
                    feed.offer(prior)
                active.end(request)
            for _ in range(200):
                if (await control.experts())["prior"]["id"] == wanted:
                    break
                await asyncio.sleep(0.02)
            alone = ActiveRequests(
                load(data_path("maps") / "planted-moe.json"), kappa=256.0, min_distance=0.0
            )
            just_a = alone.begin("a", {"codegen": 1.0})
            assert just_a is not None
            assert (await control.experts())["prior"]["id"] == just_a.id
