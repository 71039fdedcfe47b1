"""Maps and attribution on the real engine: collected halves, concurrent requests, a quick A, B, A."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from moe_proxy.engine.build import EngineBuild
from moe_proxy.engine.control import EngineControl, PriorFeed
from moe_proxy.resources import data_path
from moe_proxy.routing.active import ActiveRequests
from moe_proxy.routing.collect import builtin_prompts, held_out_prompts
from moe_proxy.routing.router_map import load
from tests.support.engine_process import engine_process
from tests.support.text import call

pytestmark = pytest.mark.engine

DOMAINS = ("codegen", "math", "creative_write", "chinese_tech")


class Runner:
    """A CollectEngine on a bare llama-server."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket

    async def complete(self, text: str, request_id: str) -> None:
        """A greedy answer of a few tokens."""
        await asyncio.to_thread(_complete, self.socket, text, request_id)

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
