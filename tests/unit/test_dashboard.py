"""The dashboard: a page that needs nothing from elsewhere, and events behind the same doors as all."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from moe_proxy.access import key_digest
from moe_proxy.proxy import dashboard
from moe_proxy.proxy.context import SecurityPolicy
from moe_proxy.proxy.security import check_key
from tests.support.surface import eventually, surface

PAGE = Path(dashboard.__file__).parent / "page"
KEYS = SecurityPolicy(key_digests=(key_digest("sk-right"),))


async def _stats() -> dict[str, Any]:
    return {"uptime_s": 1, "requests": {"total": 0, "domains": {}}, "experts": None}


async def _placement() -> dict[str, Any]:
    return {"experts": 2, "resident": {"0": "01"}, "prior": None, "remarks": []}


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    async for line in answer.content:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


async def test_the_page_and_its_files() -> None:
    """A page of this proxy's own, which no other may frame and which may load nothing from elsewhere."""
    async with surface() as proxy:
        for path, kind in (("/dashboard", "text/html"), *(
            (f"/dashboard/{name}", kind) for name, kind in dashboard._FILES.items()
        )):  # fmt: skip
            status, headers, body = await proxy.get(path)
            assert (status, headers["Content-Type"]) == (200, f"{kind}; charset=utf-8")
            assert (
                body == (PAGE / (path.rpartition("/")[2] if "." in path else "dashboard.html")).read_bytes()
            )
            policy = headers["Content-Security-Policy"]
            assert policy.startswith(
                "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"
            )
            assert "unsafe" not in policy
        status, _, body = await proxy.get("/dashboard/none.js")
        assert (status, b"there is no /dashboard/none.js" in body) == (404, True)


def test_nothing_comes_from_elsewhere() -> None:
    """It works without internet: no address of another host, no script or style inside the page itself."""
    assert {path.name for path in PAGE.iterdir()} == set(dashboard._FILES)
    for path in PAGE.iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"(?m)^\s*// .*$", "", text), path.name
    page = (PAGE / "dashboard.html").read_text(encoding="utf-8")
    assert re.findall(r"<script(?![^>]* src=)|<style|\bon\w+=|\bstyle=", page) == []
    scripts = "".join(path.read_text(encoding="utf-8") for path in PAGE.glob("*.js"))
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", scripts) == []


async def test_events() -> None:
    """Server-sent events: the first one brings numbers and where experts lie, later ones what is new."""
    async with (
        surface(stats=_stats, placement=_placement) as proxy,
        proxy.http.get(proxy.url + "/dashboard/events") as answer,
    ):
        assert (answer.status, answer.headers["Content-Type"]) == (200, "text/event-stream")
        assert answer.headers["X-Accel-Buffering"] == "no"
        events = _events(answer)
        first = await asyncio.wait_for(anext(events), 20)
        assert first["placement"] == await _placement()
        assert first["stats"] == await _stats()
        (point,) = first["points"]
        assert (point["first"], point["tokens_per_s"], point["hit_rate"]) == (True, None, None)
        second = await asyncio.wait_for(anext(events), 20)
        assert "placement" not in second
        assert [point["requests_per_s"] for point in second["points"]] == [0.0]


async def test_a_key_is_needed_for_the_events_alone() -> None:
    """A browser opens an address without a key: the page tells nothing, so it may; the numbers need one."""
    async with surface(security=KEYS, stats=_stats) as proxy:
        for name in ("", *(f"/{name}" for name in dashboard._FILES)):
            assert (await proxy.get(f"/dashboard{name}"))[0] == 200
            check_key({}, f"/dashboard{name}", KEYS)
        assert (await proxy.get("/dashboard/events"))[0] == 401
        assert (await proxy.get("/dashboard/events", headers={"Authorization": "Bearer sk-wrong"}))[0] == 401
        url, key = proxy.url + "/dashboard/events", {"Authorization": "Bearer sk-right"}
        async with proxy.http.get(url, headers=key) as answer:
            assert (await asyncio.wait_for(anext(_events(answer)), 20))["stats"] == await _stats()


@pytest.mark.parametrize("headers", [{"Origin": "https://evil.example"}, {"Host": "evil.example"},
                                     {"Sec-Fetch-Site": "cross-site"}])  # fmt: skip
async def test_pages_of_others_see_nothing(headers: dict[str, str]) -> None:
    """The same Host and Origin checks as for every route."""
    async with surface(stats=_stats) as proxy:
        for path in ("/dashboard", "/dashboard/events"):
            assert (await proxy.get(path, headers=headers))[0] == 403


async def test_a_browser_that_leaves_is_noticed() -> None:
    """The place of a watcher whose connection is gone is free again."""
    reads = 0

    async def stats() -> dict[str, Any]:
        nonlocal reads
        reads += 1
        return await _stats()

    def reading() -> bool:
        return "watching" in {task.get_name() for task in asyncio.all_tasks()}

    async with surface(stats=stats) as proxy:
        async with proxy.http.get(proxy.url + "/dashboard/events") as answer:
            await asyncio.wait_for(anext(_events(answer)), 20)
            assert reading()
            answer.close()
        await eventually(lambda: not reading(), timeout_s=20)


async def test_shutdown_ends_the_events() -> None:
    """A view that is open holds up no shutdown: its stream ends in order."""
    async with surface(stats=_stats) as proxy, proxy.http.get(proxy.url + "/dashboard/events") as answer:
        events = _events(answer)
        await asyncio.wait_for(anext(events), 20)
        stopping = asyncio.create_task(proxy.listening.stop(0.5))
        async for _ in events:
            pass
        assert answer.content.at_eof()
        await asyncio.wait_for(stopping, 20)


async def test_head_begins_no_stream() -> None:
    """HEAD works, and asks the engine for nothing."""
    async with surface(stats=_stats) as proxy, proxy.http.head(proxy.url + "/dashboard/events") as answer:
        assert (answer.status, answer.headers["Content-Type"]) == (200, "text/event-stream")
