"""The surface around the APIs: health, metrics, the observer, the queue, the drain, the ports."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import socket
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import pytest

from moe_proxy.errors import ConfigError, EngineGoneError, EngineStartError
from moe_proxy.proxy.context import Limits
from moe_proxy.proxy.listening import serve
from moe_proxy.proxy.server import make_app
from tests.support.surface import CHAT, BackendState, eventually, lines_of, surface


async def test_health_and_ps_when_ready() -> None:
    """Ready is 200; a running model expires at a date that parses; a crash gives its reason."""
    async with surface() as proxy:
        status, _, body = await proxy.get("/health")
        assert (status, json.loads(body)) == (200, {"status": "ok", "state": "ready"})
        _, _, body = await proxy.get("/api/ps")
        assert datetime.fromisoformat(json.loads(body)["models"][0]["expires_at"]).year > 2100
        proxy.backend.status = BackendState("crashed", "signal 9")
        status, _, body = await proxy.get("/health")
        assert (status, json.loads(body)["reason"]) == (503, "signal 9")


async def test_failed_start() -> None:
    """Waiters of a failed start all get the reason, each in its own form."""
    async with surface() as proxy:
        proxy.backend.error = EngineStartError("not enough memory", "see the log")
        status, body = await proxy.ask("/api/chat", CHAT)
        assert (status, body) == (503, {"error": "not enough memory: see the log"})
        status, body = await proxy.ask("/v1/chat/completions", {**CHAT, "stream": True})
        assert (status, body["error"]["type"]) == (503, "unavailable_error")
        status, body = await proxy.ask("/v1/messages", CHAT)
        assert (status, body["type"], body["error"]["type"]) == (503, "error", "unavailable_error")


async def test_classified_and_observed() -> None:
    """Text requests are classified, and observed once at begin and once at end, under the engine's id."""
    async with surface() as proxy:
        for path in ("/v1/chat/completions", "/api/chat", "/v1/completions"):
            await proxy.post(path, {**CHAT, "prompt": "write code"})
        await proxy.post("/v1/embeddings", {"input": "code"})
        await eventually(lambda: len(proxy.observer.ended) == 3)
        paths = [begun[1] for begun in proxy.observer.begun]
        assert paths == ["/v1/chat/completions", "/api/chat", "/v1/completions"]
        assert all(begun[2] and begun[2].domain == "codegen" for begun in proxy.observer.begun)
        ids = [begun[0] for begun in proxy.observer.begun]
        assert proxy.observer.ended == ids
        assert [seen.headers["X-Moe-Request"] for seen in proxy.fake.requests[:3]] == ids
        assert proxy.context.metrics.requests()["domains"] == {"codegen": 3}


async def test_named_domain() -> None:
    """X-Moe-Domain names the domain when it is known, and is ignored when not; it does not travel on."""
    async with surface(domain_labels=frozenset({"law"})) as proxy:
        for name in ("math", "law", "nonsense"):
            await proxy.post("/v1/chat/completions", CHAT, headers={"X-Moe-Domain": name})
        domains = [begun[2].domain for begun in proxy.observer.begun if begun[2]]
        assert domains == ["math", "law", "codegen"]
        assert "X-Moe-Domain" not in proxy.fake.requests[0].headers


async def test_side_steps_never_fail_a_request(caplog: pytest.LogCaptureFixture) -> None:
    """A failing classifier or observer is counted and logged once, and the client does not notice."""
    async with surface() as proxy:
        proxy.classifier.fails = proxy.observer.fails = True
        for _ in range(3):
            assert (await proxy.post("/v1/chat/completions", CHAT))[0] == 200
        await eventually(lambda: len(proxy.observer.ended) == 3)
        await eventually(
            lambda: proxy.context.metrics.requests()["step_failures"] == {"classify": 3, "observe": 6}
        )
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert ["classify" in record.getMessage() for record in said] == [True, False]
    assert all(record.exc_info for record in said)


async def test_a_slow_classifier_holds_nobody_up() -> None:
    """Slow classifiers run off the loop and are time-boxed: the request then goes on without a domain."""
    async with surface(limits=Limits(classify_s=0.05)) as proxy:
        proxy.classifier.slow = True
        try:
            # Nobody releases it: the box alone lets the request go on.
            assert (await proxy.post("/v1/chat/completions", CHAT))[0] == 200
            assert proxy.classifier.asked == 1
            assert [begun[2] for begun in proxy.observer.begun] == [None]
            assert proxy.context.metrics.requests()["step_failures"] == {"classify": 1}
        finally:
            proxy.classifier.released.set()
        # The answer of a classifier that is released is taken.
    async with surface(limits=Limits(classify_s=60)) as proxy:
        proxy.classifier.slow = True
        proxy.classifier.released.set()
        assert (await proxy.post("/v1/chat/completions", {**CHAT, "model": "x"}))[0] == 200
        assert proxy.observer.begun[0][2] is not None


async def test_a_client_that_leaves_a_slow_classifier() -> None:
    """While a slow classifier works others are served; a client that goes away then leaves nothing behind."""
    async with surface(limits=Limits(classify_s=60, max_in_flight=1)) as proxy:
        proxy.classifier.slow = True
        try:
            asking = asyncio.create_task(proxy.post("/v1/chat/completions", CHAT))
            await eventually(lambda: proxy.classifier.asked)
            assert (await proxy.get("/livez"))[0] == 200
            assert (await proxy.post("/v1/chat/completions", CHAT))[0] == 429
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking

            await eventually(lambda: proxy.context.metrics.requests()["active"] == 0)
            named = {"X-Moe-Domain": "math"}
            assert (await proxy.post("/v1/chat/completions", CHAT, headers=named))[0] == 200
            assert len(proxy.fake.requests) == 1
            assert len(proxy.observer.begun) == 1
            assert not proxy.classifier.released.is_set()
        finally:
            proxy.classifier.released.set()


async def test_queue_full() -> None:
    """A full queue is 429 for OpenAI's clients, 503 in its words for Ollama's, both with Retry-After."""
    async with surface("--hang", limits=Limits(max_in_flight=1)) as proxy:
        first = asyncio.create_task(proxy.post("/api/chat", CHAT))
        await eventually(lambda: proxy.fake.requests)
        status, headers, body = await proxy.post("/v1/chat/completions", CHAT)
        assert (status, headers["Retry-After"]) == (429, "1")
        assert json.loads(body)["error"]["type"] == "rate_limit_error"
        status, headers, body = await proxy.post("/api/chat", CHAT)
        assert (status, headers["Retry-After"]) == (503, "1")
        assert json.loads(body) == {
            "error": "server busy, please try again.  maximum pending requests exceeded"
        }
        assert (await proxy.get("/api/tags"))[0] == 200
        first.cancel()


async def test_body_limit() -> None:
    """A body over the limit is 413 in its family's form, announced or not; one under it may be large."""

    async def pieces() -> Any:
        for _ in range(5):
            yield b"x" * 1000

    async with surface(limits=Limits(max_body_bytes=3000, inline_body_bytes=10)) as proxy:
        status, body = await proxy.ask("/api/chat", {**CHAT, "x": "x" * 3000})
        assert status == 413
        assert "3000" in body["error"]
        async with proxy.http.post(proxy.url + "/v1/chat/completions", data=pieces()) as response:
            assert response.status == 413
            assert "message" in (await response.json())["error"]
        assert (await proxy.post("/api/chat", CHAT))[0] == 200


async def test_large_body() -> None:
    """Several megabytes go through."""
    async with surface() as proxy:
        messages = [{"role": "user", "content": "code " * 1_000_000}]
        data = io.BytesIO(json.dumps({**CHAT, "messages": messages, "stream": False}).encode())
        async with proxy.http.post(proxy.url + "/api/chat", data=data) as response:
            assert (response.status, (await response.json())["done"]) == (200, True)
        assert isinstance(proxy.fake.requests[0].body, dict)
        assert proxy.fake.requests[0].body["messages"] == messages


async def test_unknown_routes_and_methods() -> None:
    """Unknown paths are 404 and wrong methods 405 with Allow; OPTIONS and HEAD work."""
    async with surface() as proxy:
        status, _, body = await proxy.get("/nothing")
        assert (status, json.loads(body)["error"]["type"]) == (404, "not_found_error")
        status, headers, _ = await proxy.get("/v1/chat/completions")
        assert (status, headers["Allow"]) == (405, "POST, OPTIONS")
        async with proxy.http.options(proxy.url + "/api/tags") as response:
            assert (response.status, response.headers["Allow"]) == (204, "GET, HEAD, OPTIONS")
        async with proxy.http.head(proxy.url + "/api/tags") as response:
            assert (response.status, await response.read()) == (200, b"")
        assert (await proxy.get("//api//tags/"))[0] == 200


async def test_stats_and_metrics() -> None:
    """/stats is the provider's JSON; /metrics has ours and the pager's counters, ours also without it."""
    numbers: dict[str, Any] = {
        "engine": {"state": "ready", "restarts": 2},
        "experts": {"hits": 5, "misses": 1, "hit_bytes": 500, "miss_bytes": 100, "resident_bytes": 4096},
    }

    async def stats() -> Mapping[str, object]:
        if not numbers:
            raise EngineGoneError("gone")
        return numbers

    async with surface(stats=stats) as proxy:
        await proxy.post("/api/chat", CHAT)
        _, _, body = await proxy.get("/stats")
        assert json.loads(body) == numbers
        _, headers, body = await proxy.get("/metrics")
        text = body.decode()
        assert headers["Content-Type"].startswith("text/plain; version=")
        for line in (
            'moe_proxy_requests_total{route="/api/chat",status="200"} 1.0',
            'moe_proxy_time_to_first_token_seconds_count{route="/api/chat"} 1.0',
            'moe_proxy_request_duration_seconds_count{route="/api/chat"} 1.0',
            'moe_proxy_classified_total{domain="codegen"} 1.0',
            "moe_proxy_requests_in_flight 0.0",
            "moe_proxy_engine_restarts_total 2.0",
            "moe_proxy_engine_ready 1.0",
            "moe_proxy_expert_hits_total 5.0",
            "moe_proxy_expert_miss_bytes_total 100.0",
            "moe_proxy_expert_resident_bytes 4096.0",
        ):
            assert line in text.splitlines()
        numbers.clear()
        assert (await proxy.get("/stats"))[0] == 502
        status, _, body = await proxy.get("/metrics")
        assert status == 200
        assert b"moe_proxy_requests_total" in body
        assert b"expert_hits" not in body


async def test_drain_lets_streams_finish() -> None:
    """Stopping lets a running stream finish, lets nobody in, and waits for the observer."""
    async with surface("--slow-chunks", "0.02") as proxy:
        async with proxy.http.post(proxy.url + "/api/chat", json=CHAT) as response:
            await response.content.readany()
            stopping = asyncio.create_task(proxy.listening.stop())
            await asyncio.sleep(0.01)
            with pytest.raises(OSError):
                await asyncio.open_connection("127.0.0.1", proxy.listening.port)
            assert lines_of(await response.read())[-1]["done"] is True
        await stopping
        assert proxy.observer.ended == [proxy.observer.begun[0][0]]


@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions"])
async def test_drain_cuts_at_its_limit(path: str) -> None:
    """A stream that runs past the limit ends with an error in its own form; a held request gets a status."""
    async with surface("--hang-after-chunks", "3") as proxy:
        async with proxy.http.post(proxy.url + path, json={**CHAT, "stream": True}) as response:
            await response.content.readany()
            await proxy.listening.stop(0.05)
            body = await response.read()
        assert b"shutting down" in body.strip().split(b"\n")[-1]
        await eventually(lambda: proxy.fake.requests[0].disconnected)
    async with surface(ready=False) as proxy:
        asking = asyncio.create_task(proxy.ask(path, {**CHAT, "stream": False}))
        await eventually(lambda: proxy.context.metrics.requests()["active"] == 1)
        await proxy.listening.stop(0)
        status, body = await asking
        assert status == 503
        assert "shutting down" in json.dumps(body)


async def test_draining_refuses() -> None:
    """While draining, a request on an open connection is a 503 with Retry-After, and health says so."""
    async with surface("--hang") as proxy:
        # Two connections that stay open: one for the request that hangs, one for those that follow.
        await asyncio.gather(proxy.get("/livez"), proxy.get("/livez"))
        asking = asyncio.create_task(proxy.post("/api/chat", CHAT))
        await eventually(lambda: proxy.fake.requests)
        stopping = asyncio.create_task(proxy.listening.stop(5))
        await asyncio.sleep(0.01)
        status, headers, _ = await proxy.post("/v1/chat/completions", CHAT)
        assert (status, headers["Retry-After"]) == (503, "1")
        status, _, body = await proxy.get("/health")
        assert (status, json.loads(body)["state"]) == (503, "draining")
        await proxy.listening.cut()
        assert (await asking)[0] == 503
        await stopping


async def test_ports() -> None:
    """Port 0 finds a free one on both loopbacks; a taken port is a ConfigError that names it."""
    async with surface() as proxy:
        assert "127.0.0.1" in proxy.listening.addresses
        if "::1" in proxy.listening.addresses:
            async with proxy.http.get(f"http://[::1]:{proxy.listening.port}/livez") as response:
                assert response.status == 200
        with pytest.raises(ConfigError, match=f"port {proxy.listening.port} of 127.0.0.1 is in use"):
            await serve(make_app(proxy.context), "127.0.0.1", proxy.listening.port)
        for host in ("nowhere", "192.0.2.1"):
            with pytest.raises(ConfigError):
                await serve(make_app(proxy.context), host, 0)


async def test_http_1_0_client() -> None:
    """A client of HTTP/1.0 gets its stream, ended by the end of the connection."""
    async with surface() as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.listening.port)
        body = json.dumps(CHAT).encode()
        writer.write(b"POST /api/chat HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
        assert b"transfer-encoding" not in head.lower()
        assert lines_of(answer)[-1]["done"] is True


async def test_many_streams_at_once() -> None:
    """Two hundred streams at once lose no byte and mix up nothing."""
    async with surface(limits=Limits(max_in_flight=200)) as proxy:
        answers = await asyncio.gather(*(proxy.post("/api/chat", CHAT) for _ in range(200)))
        for status, _, body in answers:
            assert status == 200
            text = "".join(line["message"]["content"] for line in lines_of(body))
            assert text == proxy.fake.switches.reply
        assert proxy.context.metrics.requests()["active"] == 0


async def test_half_a_listening_pair_is_no_listening() -> None:
    """A port that another program holds on ::1 alone is in use too: localhost may mean either."""
    other = socket.socket(socket.AF_INET6)
    try:
        other.bind(("::1", 0))
    except OSError:
        other.close()
        pytest.skip("no IPv6 here")
    other.listen()
    async with surface() as proxy:
        with pytest.raises(ConfigError, match="of ::1 is in use"):
            await serve(make_app(proxy.context), "127.0.0.1", other.getsockname()[1])
    other.close()
