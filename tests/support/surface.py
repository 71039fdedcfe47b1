"""Owns an HTTP surface in tests: the application on a free port over the fake engine, all in one loop."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from moe_proxy.domains.base import Classification
from moe_proxy.model.gguf_header import GgufHeader
from moe_proxy.proxy.context import Limits, ModelCard, ProxyContext
from moe_proxy.proxy.listening import Listening, serve
from moe_proxy.proxy.server import make_app

sys.path.insert(0, str(Path(__file__).parent.parent / "fakes"))

from fake_llama_info import PAGE as PAGE
from fake_llama_server import Fake, parse
from fake_llama_server import make_app as make_fake_app

TEMPLATE = "{% if tools %}{{ tools }}{% endif %}{% if enable_thinking %}<think>{% endif %}"
DIGEST = "ab" * 32
HELLO: Any = [{"role": "user", "content": "write code"}]
CHAT: dict[str, Any] = {"model": "planted-moe", "messages": HELLO}


def header(**changes: Any) -> GgufHeader:
    """The header of a small model."""
    facts: dict[str, Any] = {
        "files": (Path("/models/Planted-MoE-Q4_K_M.gguf"),),
        "architecture": "qwen3moe",
        "name": "Planted MoE",
        "basename": "Planted",
        "parameter_count": 30_532_122_624,
        "size_bytes": 18_556_685_824,
        "quantization": "Q4_K_M",
        "context_length": 40960,
        "embedding_length": 2048,
        "block_count": 48,
        "expert_count": 128,
        "expert_used_count": 8,
        "chat_template": TEMPLATE,
        "has_fim": True,
        "vocabulary_size": 151936,
        "modified_at_s": 1_700_000_000.5,
        "metadata": {"general.type": "model", "qwen3moe.rope.original_context_length": 40960},
        "tensors": (),
    }
    return GgufHeader(**(facts | changes))


def card(**changes: Any) -> ModelCard:
    """The model card of a small model that can do everything but see."""
    facts: dict[str, Any] = {
        "name": "planted-moe",
        "aliases": ("gpt-4o",),
        "header": header(),
        "digest": DIGEST,
        "context_length": 4096,
        "capabilities": ("completion", "tools", "thinking", "insert"),
    }
    return ModelCard(**(facts | changes))


@dataclass
class BackendState:
    """What the backend says of itself."""

    state: str = "ready"
    reason: str = ""
    progress: float | None = None


@dataclass
class FakeBackend:
    """A backend whose readiness the test decides: ``gate`` opens it, ``error`` lets it fail."""

    socket: Path
    status: BackendState = field(default_factory=BackendState)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None

    async def ready(self, timeout_s: float) -> None:
        """Wait for the gate, then say what the test wants."""
        await asyncio.wait_for(self.gate.wait(), timeout_s)
        if self.error is not None:
            raise self.error


@dataclass
class Recorder:
    """An observer that notes what it was told."""

    begun: list[tuple[str, str, Classification | None]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    fails: bool = False

    def begin(self, request_id: str, path: str, classification: Classification | None) -> None:
        """Note, or fail."""
        self.begun.append((request_id, path, classification))
        if self.fails:
            raise RuntimeError("observer failed on demand")

    async def end(self, request_id: str) -> None:
        """Note, a little later, as a real one does; or fail."""
        await asyncio.sleep(0)
        self.ended.append(request_id)
        if self.fails:
            raise RuntimeError("observer failed on demand")


class WordClassifier:
    """Says codegen for texts with the word code, and abstains from others.

    A slow one notes that it was asked, and waits until it is released.
    """

    name = "word"
    slow = False
    fails = False

    def __init__(self) -> None:
        self.asked = 0
        self.released = threading.Event()

    def classify(self, text: str) -> Classification:
        """Look for one word."""
        self.asked += 1
        if self.slow:
            self.released.wait(60)
        if self.fails:
            raise RuntimeError("classifier failed on demand")
        return Classification({"codegen": 1.0} if "code" in text else {}, self.name)


@dataclass
class Surface:
    """Everything a test may want to touch."""

    url: str
    fake: Fake
    backend: FakeBackend
    observer: Recorder
    classifier: WordClassifier
    context: ProxyContext
    listening: Listening
    http: aiohttp.ClientSession

    async def post(self, path: str, body: Any, **more: Any) -> tuple[int, Mapping[str, str], bytes]:
        """POST ``body`` as JSON: status, headers, bytes."""
        async with self.http.post(self.url + path, json=body, **more) as response:
            return response.status, response.headers, await response.read()

    async def get(self, path: str, **more: Any) -> tuple[int, Mapping[str, str], bytes]:
        """GET: status, headers, bytes."""
        async with self.http.get(self.url + path, **more) as response:
            return response.status, response.headers, await response.read()

    async def ask(self, path: str, body: Any) -> tuple[int, Any]:
        """POST: status and JSON."""
        status, _, answer = await self.post(path, body)
        return status, json.loads(answer)

    async def raw(self, *pieces: bytes) -> bytes:
        """The whole answer to bytes on a connection of their own."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.listening.port)
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            return await reader.read()
        finally:
            writer.close()
            await writer.wait_closed()


def lines_of(body: bytes) -> list[Any]:
    """The objects of an NDJSON stream, which has no blank line."""
    assert body.endswith(b"\n")
    return [json.loads(line) for line in body[:-1].split(b"\n")]


async def eventually(condition: Any, timeout_s: float = 5.0) -> None:
    """Return once ``condition()`` is true; fail after ``timeout_s``."""
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + timeout_s
    while not condition():
        assert loop.time() < give_up_s, "it did not come true in time"
        await asyncio.sleep(0.005)


async def _no_stats() -> Mapping[str, object]:
    return {}


@asynccontextmanager
async def surface(
    *switches: str, limits: Limits | None = None, ready: bool = True, **context: Any
) -> AsyncIterator[Surface]:
    """Run the application over the fake engine with ``switches``; ``context`` goes into the ProxyContext."""
    with tempfile.TemporaryDirectory(prefix="moe") as folder:
        socket = Path(folder) / "e.sock"
        fake = parse(["--host", str(socket), *switches])
        fake.ready = True
        engine = web.AppRunner(
            make_fake_app(fake), handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await engine.setup()
        await web.UnixSite(engine, str(socket)).start()
        backend = FakeBackend(socket)
        if ready:
            backend.gate.set()
        observer, classifier = Recorder(), WordClassifier()
        facts: dict[str, Any] = {
            "backend": backend,
            "model": card(),
            "observer": observer,
            "classifier": classifier,
            "stats": _no_stats,
            "limits": limits or Limits(),
        }
        made = ProxyContext(**(facts | context))
        listening = await serve(make_app(made), "127.0.0.1", 0)
        try:
            async with aiohttp.ClientSession(auto_decompress=False) as http:
                yield Surface(
                    f"http://127.0.0.1:{listening.port}",
                    fake,
                    backend,
                    observer,
                    classifier,
                    made,
                    listening,
                    http,
                )
        finally:
            await listening.stop(0.5)
            await engine.cleanup()
