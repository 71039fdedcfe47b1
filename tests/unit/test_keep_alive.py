"""How long the model stays loaded: the timer, what a request asks for, and the operator's policy."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime, timezone
from typing import Any

import pytest

from moe_proxy.durations import parse_seconds
from moe_proxy.proxy.keep_alive import KeepAlive, KeepAlivePolicy
from tests.support.surface import Surface, eventually, surface

HELLO: Any = [{"role": "user", "content": "hi"}]
CHAT = {"model": "planted-moe", "messages": HELLO, "stream": False}
LOAD = {"model": "planted-moe"}
OBEY = KeepAlivePolicy(obeyed=True, default_s=300.0)


class Unloads:
    """Counts how often the model was unloaded."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        """Once more."""
        self.count += 1


async def _rounds(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_zero_unloads_after_the_last_user() -> None:
    """``0`` unloads once nobody needs the model any more, and not before; the next load begins anew."""
    unloads = Unloads()
    kept = KeepAlive(OBEY, unloads)
    with kept.used():
        with kept.used():
            assert kept.asked(0.0)
        await _rounds()
        assert unloads.count == 0
    await eventually(lambda: unloads.count == 1)
    with kept.used():
        assert kept.left_s() == 300.0


async def test_timer() -> None:
    """The time counts from the end of the last request; a new request stops it, negative is for ever."""
    unloads = Unloads()
    kept = KeepAlive(OBEY, unloads)
    with kept.used():
        kept.asked(0.01)
    with kept.used():
        # Longer than the timer would have been: it is stopped while somebody needs the model.
        await asyncio.sleep(0.03)
        assert unloads.count == 0
    await eventually(lambda: unloads.count == 1)
    with kept.used():
        kept.asked(-1.0)
    assert kept.left_s() is None
    await _rounds()
    assert unloads.count == 1


async def test_ignore_short_unloads_only_when_told_to() -> None:
    """By default a request's ``keep_alive`` is not heeded; ``expire`` is, unless a load takes it back."""
    unloads = Unloads()
    kept = KeepAlive(KeepAlivePolicy(), unloads)
    with kept.used():
        assert not kept.asked(0.0)
    await _rounds()
    assert unloads.count == 0
    assert kept.left_s() is None
    with kept.used():
        kept.expire()
        kept.renew()
    await _rounds()
    assert unloads.count == 0
    with kept.used():
        kept.expire()
    await eventually(lambda: unloads.count == 1)


async def test_closed() -> None:
    """After the end of the proxy no timer is left and nothing is unloaded."""
    unloads = Unloads()
    kept = KeepAlive(OBEY, unloads)
    with kept.used():
        kept.asked(0.0)
    kept.close()
    with kept.used():
        kept.expire()
    await _rounds()
    assert unloads.count == 0


async def _expires_in_s(proxy: Surface) -> float:
    _, _, body = await proxy.get("/api/ps")
    date = datetime.fromisoformat(json.loads(body)["models"][0]["expires_at"])
    return (date - datetime.now(timezone.utc)).total_seconds()


async def test_expires_at() -> None:
    """/api/ps says when the model will be unloaded; far off for one that stays."""
    async with surface(keep_alive=OBEY, unload=Unloads()) as proxy:
        for asked, seconds in ((None, 300), ("10m", 600), (None, 600), (90, 90)):
            await proxy.post("/api/chat", CHAT if asked is None else {**CHAT, "keep_alive": asked})
            assert seconds - 60 < await _expires_in_s(proxy) < seconds + 60
        await proxy.post("/api/generate", {**LOAD, "keep_alive": -1})
        assert await _expires_in_s(proxy) > 1e9
        await proxy.post("/api/embed", {**LOAD, "input": "x", "keep_alive": "2h"})
        assert 7000 < await _expires_in_s(proxy) < 7300


@pytest.mark.parametrize("obeyed", [True, False])
async def test_policies(obeyed: bool) -> None:
    """A chat with ``keep_alive: 0`` unloads when the operator says so, an empty prompt with it always."""
    unloads = Unloads()
    async with surface(keep_alive=KeepAlivePolicy(obeyed), unload=unloads) as proxy:
        assert (await proxy.post("/api/chat", {**CHAT, "keep_alive": 0}))[0] == 200
        await eventually(lambda: proxy.context.metrics.requests()["active"] == 0)
        await _rounds()
        assert unloads.count == int(obeyed)
        _, _, body = await proxy.post("/api/generate", {**LOAD, "keep_alive": "0", "prompt": ""})
        assert json.loads(body)["done_reason"] == "unload"
        await eventually(lambda: unloads.count == 1 + int(obeyed))


async def test_unloading_waits_for_running_requests() -> None:
    """A running stream is not cut by somebody's request to unload; the model goes when it has ended."""
    unloads = Unloads()
    async with surface("--hang-after-chunks", "3", unload=unloads) as proxy:
        async with proxy.http.post(proxy.url + "/api/chat", json={**CHAT, "stream": True}) as response:
            await response.content.readany()
            await proxy.post("/api/chat", {**LOAD, "keep_alive": 0})
            await _rounds(20)
            assert unloads.count == 0
        await eventually(lambda: unloads.count == 1)


@pytest.mark.parametrize("value", ["soon", True, [], "5 m"])
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/embed"])
async def test_bad_keep_alive(path: str, value: Any) -> None:
    """A ``keep_alive`` that is no duration is a 400 on every route that takes one."""
    async with surface() as proxy:
        status, _, _ = await proxy.post(path, {**CHAT, "prompt": "x", "input": "x", "keep_alive": value})
        assert status == 400


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5m", 300.0), ("1h30m", 5400.0), ("-1m", -60.0), ("7", 7.0), ("", None), ("1h30", None)],
)
def test_durations(text: str, seconds: float | None) -> None:
    """Go's durations and plain seconds."""
    assert parse_seconds(text) == seconds
