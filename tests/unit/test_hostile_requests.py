"""Requests that no sane client sends: each gets an error in its form, and none costs the others."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import socket
from typing import Any

import pytest

from moe_proxy.proxy.context import Limits
from tests.support.surface import eventually, surface

HELLO: Any = [{"role": "user", "content": "write code"}]
CHAT = {"model": "planted-moe", "messages": HELLO, "stream": False}
HEAD = b"POST %s HTTP/1.1\r\nHost: localhost\r\n%sContent-Length: %d\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions"])
@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity", "9" * 5000])
async def test_numbers_that_json_cannot_hold(path: str, number: str) -> None:
    """A number that no float holds is a 400 that says so: sent on, it would be no JSON any more."""
    body = json.dumps({**CHAT, "options": {"temperature": 7}}).replace("7", number)
    async with surface() as proxy:
        answer = await proxy.raw(HEAD % (path.encode(), b"", len(body)) + body.encode())
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"the body is not JSON" in answer


async def test_a_duration_beyond_all_numbers() -> None:
    """keep_alive may be any JSON number; a very large one is for ever."""
    async with surface() as proxy:
        assert (await proxy.post("/api/chat", {**CHAT, "keep_alive": 10**400}))[0] == 200
        assert (await proxy.post("/api/chat", {**CHAT, "keep_alive": -(10**400)}))[0] == 200


@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions"])
async def test_a_body_nested_deeper_than_python_walks(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the parser takes and a walk through it does not is a 400, whichever step meets it first."""
    content: Any = "x"
    for _ in range(5000):
        content = [{"type": "x", "content": content}]
    body = {**CHAT, "messages": [{"role": "user", "content": content}]}
    monkeypatch.setattr("moe_proxy.proxy.exchange._object_of", lambda raw: body)
    async with surface() as proxy:
        status, _, answer = await proxy.post(path, CHAT)
        assert (status, b"nested too deeply" in answer) == (400, True)


@pytest.mark.parametrize("body", [b"garbage" * 10, gzip.compress(b"{}")[:-9] + b"xxxxxxxxx"])
async def test_a_body_that_is_not_compressed_as_it_says(
    body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A broken Content-Encoding is the client's fault: a 400, and no line in the log."""
    async with surface() as proxy:
        answer = await proxy.raw(HEAD % (b"/api/chat", b"Content-Encoding: gzip\r\n", len(body)) + body)
        assert answer.startswith(b"HTTP/1.1 400 ")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    "data",
    [
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        b"FOO /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x00\xff\x16\x03garbage\r\n\r\n",
    ],
)
async def test_no_http_does_not_fill_the_log(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever sends what is no HTTP is told; the operator's log gets no traceback per request."""
    async with surface() as proxy:
        assert (await proxy.raw(data)).startswith(b"HTTP/1.0 400 ")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_line_end_in_a_path() -> None:
    """A path is judged and answered by us whatever is escaped in it."""
    async with surface() as proxy:
        answer = await proxy.raw(b"GET /v1/x%0Ay HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b'"type":"not_found_error"' in answer
        answer = await proxy.raw(b"GET /%0A HTTP/1.1\r\nHost: evil.com\r\nConnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 403 ")


async def test_a_client_that_stops_sending_gives_its_place_back() -> None:
    """Clients that hang in the middle of a body do not shut the others out for ever; slow ones are served."""
    async with surface(limits=Limits(max_in_flight=1, stall_s=0.3)) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.listening.port)
        writer.write(HEAD % (b"/api/chat", b"", 1000) + b"{")
        answer = await reader.readuntil(b"}")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"nothing of the body came for 0.3 s" in answer
        writer.close()
        body = json.dumps(CHAT).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.listening.port)
        writer.write(HEAD % (b"/api/chat", b"", len(body)))
        for start in range(0, len(body), 20):
            writer.write(body[start : start + 20])
            await asyncio.sleep(0.1)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_a_client_that_stops_reading_gives_its_slot_back() -> None:
    """A stream whose client takes no byte any more ends, and with it the work of the engine."""
    words = "word " * 200_000
    async with surface("--reply", words, limits=Limits(stall_s=0.3)) as proxy:
        body = json.dumps({**CHAT, "stream": True}).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", proxy.listening.port))
            client.sendall(HEAD % (b"/v1/chat/completions", b"", len(body)) + body)
            await eventually(lambda: proxy.fake.requests and proxy.fake.requests[0].disconnected, 20)
            await eventually(lambda: proxy.context.metrics.requests()["active"] == 0)
