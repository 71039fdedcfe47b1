"""What clients see when the engine or a client misbehaves, and that nothing is left of either."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from moe_proxy.app import Backend
from moe_proxy.engine.supervisor import State, Supervisor
from moe_proxy.proxy.context import Limits, ProxyContext
from moe_proxy.proxy.keep_alive import KeepAlivePolicy
from moe_proxy.proxy.listening import serve
from moe_proxy.proxy.server import make_app
from tests.support.fake_engine import PATIENCE_S, supervisor
from tests.support.surface import Recorder, Surface, card, eventually, surface

CHAT: dict[str, Any] = {"model": "planted-moe", "messages": [{"role": "user", "content": "hi"}]}
FAMILIES = ["/v1/chat/completions", "/api/chat"]


@dataclass
class Whole:
    """The surface over a supervised fake: a process that can die and is started again."""

    url: str
    engine: Supervisor
    observer: Recorder
    context: ProxyContext
    http: aiohttp.ClientSession
    socket: Path

    async def post(self, path: str, body: Any) -> tuple[int, bytes]:
        """POST: status and bytes."""
        async with self.http.post(self.url + path, json=body) as response:
            return response.status, await response.read()

    async def switch(self, **switches: Any) -> None:
        """Change the fake's behaviour, for this life of it."""
        connector = aiohttp.UnixConnector(str(self.socket))
        url = "http://fake/fake/switches"
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.post(url, json=switches) as response,
        ):
            assert response.status == 200


async def _no_stats() -> dict[str, object]:
    return {}


@asynccontextmanager
async def whole(folder: Path, *switches: str, **more: Any) -> AsyncIterator[Whole]:
    """Run it; at the end neither side is left."""
    observer = Recorder()
    async with supervisor(folder, *switches) as engine:
        context = ProxyContext(
            backend=Backend(folder / "engine.sock", engine),
            model=card(),
            observer=observer,
            stats=_no_stats,
            unload=engine.rest,
            **more,
        )
        listening = await serve(make_app(context), "127.0.0.1", 0)
        try:
            async with aiohttp.ClientSession() as http:
                yield Whole(listening.url, engine, observer, context, http, folder / "engine.sock")
        finally:
            await listening.stop(0.5)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runtime folder whose path leaves room for a socket name."""
    return tmp_path_factory.mktemp("run")


def _error_of(path: str, body: bytes) -> str:
    """The message of an error, which has to have the form of its family."""
    error = json.loads(body)["error"]
    return str(error if path.startswith("/api/") else error["message"])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", FAMILIES)
async def test_dies_before_the_head(folder: Path, path: str, stream: bool) -> None:
    """An engine that dies of a request: an error with its status, and the next request is served."""
    async with whole(folder) as proxy:
        await proxy.engine.ready(PATIENCE_S)
        await proxy.switch(die_before_headers=True)
        status, body = await proxy.post(path, {**CHAT, "stream": stream})
        # It is sent once more, to the engine that was started again and does not die.
        assert status == 200, _error_of(path, body)
        assert proxy.engine.status.restarts == 1


async def test_a_request_that_kills_every_engine(folder: Path) -> None:
    """A request that kills each engine it meets kills two of them at most, and ends in a 502."""
    async with whole(folder, "--die-before-headers") as proxy:
        for path in FAMILIES:
            await proxy.engine.ready(PATIENCE_S)
            before = proxy.engine.status.restarts
            status, body = await proxy.post(path, CHAT)
            assert status == 502
            assert "closed the connection unanswered" in _error_of(path, body)
            await proxy.engine.ready(PATIENCE_S)
            assert proxy.engine.status.restarts - before <= 2
        assert (await proxy.post("/tokenize", {"content": "a b"}))[0] == 200


@pytest.mark.parametrize("path", FAMILIES)
async def test_dies_in_the_middle(folder: Path, path: str) -> None:
    """After the first byte the last message of the stream says so; the next request waits for the restart."""
    async with whole(folder) as proxy:
        await proxy.engine.ready(PATIENCE_S)
        await proxy.switch(die_after_chunks=3, slow_chunks=0.01)
        status, body = await proxy.post(path, {**CHAT, "stream": True})
        last = body.strip().split(b"\n")[-1].removeprefix(b"data: ")
        assert status == 200
        assert "closed the stream" in _error_of(path, last)
        assert b"[DONE]" not in body
        assert b'"done":true' not in body
        assert (await proxy.post(path, {**CHAT, "stream": True}))[0] == 200
        assert proxy.context.metrics.requests()["failed"] == 1


@pytest.mark.parametrize("path", FAMILIES)
async def test_dies_while_loading(folder: Path, path: str) -> None:
    """Whoever waits for a model that does not load gets the reason, with the engine's last words."""
    async with whole(folder, "--exit-at-start", "3") as proxy:
        for stream in (True, False):
            status, body = await proxy.post(path, {**CHAT, "stream": stream})
            assert status == 503
            assert "the fake exits on demand" in _error_of(path, body)
        async with proxy.http.get(proxy.url + "/health") as response:
            assert response.status == 503
            assert "code 3" in (await response.json())["reason"]


async def test_unloaded_and_woken(folder: Path) -> None:
    """With Ollama's timers, the model goes after its time and comes back for the next request."""
    async with whole(folder, keep_alive=KeepAlivePolicy(obeyed=True, default_s=300.0)) as proxy:
        assert (await proxy.post("/api/chat", {**CHAT, "keep_alive": "1ms"}))[0] == 200
        await eventually(lambda: proxy.engine.status.state is State.ASLEEP, PATIENCE_S)
        async with proxy.http.get(proxy.url + "/api/ps") as response:
            assert await response.json() == {"models": []}
        async with proxy.http.get(proxy.url + "/health") as response:
            assert (response.status, (await response.json())["state"]) == (200, "asleep")
        answers = await asyncio.gather(*(proxy.post(path, {**CHAT, "stream": True}) for path in FAMILIES * 3))
        assert [status for status, _ in answers] == [200] * 6
        assert proxy.engine.status.restarts == 0


async def test_an_engine_that_closes_kept_connections() -> None:
    """A kept connection that the engine closes as a request is sent costs nothing: a new one serves it."""
    async with surface() as proxy:
        path = proxy.backend.socket
        path.rename(path.with_suffix(".alive"))
        connections = requests = ended = 0
        writers: list[asyncio.StreamWriter] = []
        body = json.dumps({"tokens": [1]}).encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)

        async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections, requests, ended
            connections += 1
            writers.append(writer)
            with contextlib.suppress(asyncio.IncompleteReadError):
                for number in range(2):
                    await reader.readuntil(b"}")
                    requests += 1
                    if number == 0:
                        writer.write(head + body)
            writer.close()
            await writer.wait_closed()
            ended += 1

        async with await asyncio.start_unix_server(once, path):
            for _ in range(6):
                status, _, answer = await proxy.post("/tokenize", {"content": "a"})
                assert (status, answer) == (200, body)
            writers[-1].close()
            await eventually(lambda: ended == connections)
        # Each but the first was first sent on the connection of the one before.
        assert (connections, requests) == (6, 11)


PHASES = ["held", "before the head", "in the stream"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [*FAMILIES, "/completion", "/api/generate"])
@pytest.mark.parametrize("phase", PHASES)
async def test_a_client_that_goes_away(phase: str, path: str, stream: bool) -> None:
    """In every phase the engine hears at once that the client has gone, and the place is free again."""
    switches = {"held": (), "before the head": ("--hang",), "in the stream": ("--hang-after-chunks", "2")}[
        phase
    ]
    if phase == "in the stream" and not path.startswith("/api/"):
        # Other answers that are not streamed come at once; Ollama's are put together from a stream.
        stream = True
    async with surface(*switches, ready=phase != "held") as proxy:
        body = json.dumps({**CHAT, "prompt": "x", "stream": stream}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.listening.port)
        writer.write(head + body)
        await eventually(lambda: proxy.context.metrics.requests()["active"] == 1)
        if phase != "held":
            await eventually(lambda: proxy.fake.requests)
        if phase == "in the stream" and stream:
            await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
        await eventually(lambda: proxy.context.metrics.requests()["active"] == 0)
        if phase == "held":
            proxy.backend.gate.set()
            assert (await proxy.get("/livez"))[0] == 200
            assert proxy.fake.requests == []
        else:
            await eventually(lambda: all(seen.disconnected or seen.finished for seen in proxy.fake.requests))
        await eventually(lambda: len(proxy.observer.ended) == len(proxy.observer.begun) == 1)


async def test_slow_readers() -> None:
    """Two hundred streams whose clients read nothing at first, then in small pieces: no byte is lost."""
    word = "x" * 4000
    reply = " ".join(f"{number:03}{word}" for number in range(60))
    async with surface("--reply", reply, limits=Limits(max_in_flight=200)) as proxy:
        body = json.dumps({**CHAT, "stream": True}).encode()
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: "
        )
        request = head + b"%d\r\n\r\n" % len(body) + body
        streams = [
            await asyncio.open_connection("127.0.0.1", proxy.listening.port, limit=1024) for _ in range(200)
        ]
        for _, writer in streams:
            writer.write(request)
        await eventually(lambda: len(proxy.fake.requests) == 200, 30)

        async def text(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
            data = bytearray()
            while piece := await reader.read(4096):
                data += piece
            writer.close()
            said = []
            for line in _unchunked(bytes(data)).split(b"\n"):
                if line.startswith(b"data: {"):
                    choices = json.loads(line[6:])["choices"]
                    said.append(choices[0]["delta"].get("content") or "" if choices else "")
            return "".join(said)

        for answer in await asyncio.gather(*(text(*stream) for stream in streams)):
            assert answer == reply


def _unchunked(answer: bytes) -> bytes:
    data, parts, at = answer.partition(b"\r\n\r\n")[2], [], 0
    while size := int(data[at : (end := data.index(b"\r\n", at))], 16):
        parts.append(data[end + 2 : end + 2 + size])
        at = end + 4 + size
    return b"".join(parts)


@dataclass(frozen=True)
class Held:
    """What this process holds."""

    files: int
    threads: int
    resident_bytes: int

    @classmethod
    def now(cls) -> Held:
        """Measure, after everything that can go has gone."""
        gc.collect()
        process = psutil.Process()
        return cls(process.num_fds(), threading.active_count(), process.memory_info().rss)


async def _many(proxy: Surface, count: int) -> None:
    """Short requests of several kinds, twenty at once."""
    kinds: list[tuple[str, Any]] = [
        ("/api/chat", {**CHAT, "stream": False}),
        ("/v1/chat/completions", {**CHAT, "stream": True}),
        ("/tokenize", {"content": "a"}),
        ("/api/embed", {"model": "planted-moe", "input": "a"}),
        ("/api/chat", {"model": "other"}),
    ]

    async def some(number: int) -> None:
        for turn in range(count // 20):
            path, body = kinds[(number + turn) % len(kinds)]
            assert (await proxy.post(path, body))[0] in (200, 404)

    await asyncio.gather(*(some(number) for number in range(20)))
    await eventually(lambda: len(proxy.observer.ended) == len(proxy.observer.begun))
    # What the test itself gathers is not the proxy's.
    proxy.fake.requests.clear()
    proxy.fake.usage.clear()
    proxy.fake.usage_tokens.clear()
    proxy.observer.begun.clear()
    proxy.observer.ended.clear()


async def test_thousands_of_short_requests() -> None:
    """Five thousand requests leave no socket, no thread and no memory behind."""
    async with surface("--reply", "a b") as proxy:
        await _many(proxy, 1000)
        before = Held.now()
        for _ in range(5):
            await _many(proxy, 1000)
        after = Held.now()
        # The pool of kept connections breathes.
        assert after.files <= before.files + 8
        assert after.threads <= before.threads
        assert after.resident_bytes <= before.resident_bytes + 5_000_000
