"""Owns the wiring of ``moe-proxy collect``: an engine without an HTTP surface, asked prompt by prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from moe_proxy import __version__
from moe_proxy.app import running_engine
from moe_proxy.engine.control import EngineControl
from moe_proxy.errors import EngineError
from moe_proxy.instance import InstancePaths
from moe_proxy.routing.collect import collect
from moe_proxy.routing.labelled import Unfinished
from moe_proxy.routing.router_map import ModelKey, RouterMap
from moe_proxy.served import Served


@dataclass(frozen=True)
class _Collecting:
    """An engine that answers prompts one by one and tells what they used."""

    session: aiohttp.ClientSession
    control: EngineControl
    tokens: int

    async def complete(self, text: str, request_id: str) -> None:
        """Answer ``text`` as a chat of one turn."""
        body = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self.tokens,
            "temperature": 0,
            "cache_prompt": False,
        }
        headers = {"X-Moe-Request": request_id}
        async with self.session.post(
            "http://engine/v1/chat/completions", json=body, headers=headers
        ) as response:
            if response.status != 200:
                raise EngineError(
                    f"the engine refused a prompt with status {response.status}", await response.text()
                )
            await response.read()

    async def usage(self, request_id: str) -> Mapping[str, object]:
        """Attributed counts of one prompt and its answer."""
        return await self.control.usage(request=request_id)


async def collect_map(
    served: Served,
    server: Path,
    paths: InstancePaths,
    prompts: Mapping[str, tuple[str, ...]],
    source: str,
    tokens: int,
    unfinished: Unfinished,
    progress: Callable[[str, float], None],
) -> RouterMap:
    """The router map of ``prompts``; ``tokens`` are generated after each.

    ``source`` says in the map where they are from. Goes on from ``unfinished``, and keeps it up to date.
    """
    key = ModelKey.of(served.layout)
    made = {"tool": "moe-proxy collect", "version": __version__, "source": source}

    async def keep(so_far: RouterMap, done: int) -> None:
        await asyncio.to_thread(unfinished.save, so_far, done)

    async with running_engine(served, server, paths) as engine:
        await engine.supervisor.ready(served.settings.ready_timeout_s)
        connector = aiohttp.UnixConnector(str(paths.socket))
        async with aiohttp.ClientSession(connector=connector) as session:
            return await collect(
                _Collecting(session, engine.control, tokens),
                prompts,
                key,
                made=made,
                progress=lambda done, total: progress("prompts", done / total),
                begun=await asyncio.to_thread(unfinished.begun, key),
                keep=keep,
            )
