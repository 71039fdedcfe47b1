"""Bytes go through unchanged; headers are filtered; broken streams end in an error in the client's form."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import re
from itertools import pairwise
from typing import Any

import aiohttp
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from moe_proxy.errors import EngineGoneError
from moe_proxy.proxy.context import Limits
from moe_proxy.proxy.passthrough import SseForm, forwarded_headers, returned_headers
from moe_proxy.proxy.replies import family_of
from tests.support.surface import Surface, eventually, surface

CHAT = {"model": "planted-moe", "messages": [{"role": "user", "content": "write code"}]}
STREAM = {**CHAT, "stream": True}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def _events(body: bytes) -> list[Any]:
    return [
        line.removeprefix("data: ") if line == "data: [DONE]" else json.loads(line.removeprefix("data: "))
        for line in body.decode().split("\n")
        if line.startswith("data: ")
    ]


def _client(proxy: Surface) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=proxy.url + "/v1", api_key="secret", max_retries=0)


async def _direct(proxy: Surface, target: str, body: bytes) -> bytes:
    """The engine's own answer, asked without the proxy."""
    connector = aiohttp.UnixConnector(path=str(proxy.backend.socket))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post(f"http://localhost{target}", data=body) as response,
    ):
        return await response.read()


def _timeless(answer: bytes) -> bytes:
    """Without the numbers that differ from one answer to the next."""
    return re.sub(rb'"created": ?\d+|chatcmpl-fake\d+', b"", answer)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/completion", "/infill"])
@pytest.mark.parametrize("stream", [True, False])
async def test_bytes_unchanged(path: str, stream: bool) -> None:
    """Request and answer are byte for byte what they are without the proxy, streaming and not."""
    asked = {**CHAT, "prompt": "write code", "stream": stream, "größe": "\u00e9"}
    body = json.dumps(asked, indent=3).encode()
    async with surface() as proxy:
        async with proxy.http.post(URL(f"{proxy.url}{path}?a=%252F&b", encoded=True), data=body) as response:
            answer = await response.read()
            kind = response.content_type
        seen = proxy.fake.requests[0]
        assert seen.body_sha256 == hashlib.sha256(body).hexdigest()
        # The fake notes the query as it reads it, which takes one layer of escapes off.
        assert (seen.path, seen.query) == (path, "a=%2F&b")
        assert kind == ("text/event-stream" if stream else "application/json")
        assert _timeless(answer) == _timeless(await _direct(proxy, path, body))


async def test_headers() -> None:
    """Hop-by-hop and listed headers, secrets, encodings and X-Conversation-Id stop here; ids are ours."""
    given_headers = {
        "Content-Type": "application/x-www-form-urlencoded", "Accept-Encoding": "gzip, br",
        "X-Conversation-Id": "c", "Authorization": "Bearer secret", "Connection": "keep-alive, X-Listed",
        "X-Listed": "1", "TE": "trailers", "X-Moe-Request": "forged", "Expect": "100-continue",
        "X-Kept": "yes", "Origin": "http://localhost",
    }  # fmt: skip
    async with surface() as proxy:
        status, headers, _ = await proxy.post("/v1/chat/completions", STREAM, headers=given_headers)
        sent = CIMultiDict(proxy.fake.requests[0].headers)
    assert status == 200
    for name in ("X-Conversation-Id", "Authorization", "X-Listed", "TE", "Expect", "Origin"):
        assert name not in sent
    assert sent["Content-Type"] == "application/json"
    assert sent["Accept-Encoding"] == "identity"
    assert sent["X-Kept"] == "yes"
    assert sent["X-Moe-Request"] == headers["X-Request-Id"]
    assert len(headers["X-Request-Id"]) == 16
    assert headers["X-Accel-Buffering"] == "no"
    assert headers["Cache-Control"] == "no-cache"
    assert headers["Server"] == "moe-proxy"


def test_repeated_headers() -> None:
    """Repeated headers stay repeated; the engine's CORS headers do not reach the client."""
    kept = [("Set-Cookie", "a"), ("set-cookie", "b"), ("X", "1")]
    upstream = CIMultiDictProxy(CIMultiDict([*kept, ("Access-Control-Allow-Origin", "*")]))
    assert list(returned_headers(upstream).items()) == kept
    assert "Content-Type" not in forwarded_headers(upstream, "id", has_body=False)


async def test_compressed_body() -> None:
    """A compressed request reaches the engine as what it is, without a header that says otherwise."""
    raw = gzip.compress(json.dumps(CHAT).encode())
    async with surface() as proxy:
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        async with proxy.http.post(proxy.url + "/v1/chat/completions", data=raw, headers=headers) as response:
            assert response.status == 200
        assert proxy.fake.requests[0].body == CHAT
        assert "Content-Encoding" not in proxy.fake.requests[0].headers


async def test_openai_client() -> None:
    """The official client: chat and completions, streaming and not, tool calls, embeddings, models."""
    async with surface("--tool-call", "--reasoning", "hm hm") as proxy, _client(proxy) as client:
        messages: Any = CHAT["messages"]
        whole = await client.chat.completions.create(model="m", messages=messages)
        assert whole.choices[0].message.content == proxy.fake.switches.reply
        assert whole.usage is not None
        parts = [
            chunk.choices[0].delta.content or ""
            async for chunk in await client.chat.completions.create(model="m", messages=messages, stream=True)
            if chunk.choices
        ]
        assert "".join(parts) == proxy.fake.switches.reply
        called = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        assert called.choices[0].message.tool_calls is not None
        assert called.choices[0].finish_reason == "tool_calls"
        text = await client.completions.create(model="m", prompt="go")
        assert text.choices[0].text == proxy.fake.switches.reply
        vectors = await client.embeddings.create(model="m", input=["a", "b"], encoding_format="float")
        assert len(vectors.data) == 2
        listed = [model.id async for model in client.models.list()]
        assert listed == ["planted-moe:latest"]
        assert (await client.models.retrieve("planted-moe")).id == "planted-moe:latest"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")


async def test_openai_client_sees_errors() -> None:
    """The engine's refusal keeps its status and message; the client raises an error event in a stream."""
    async with surface("--error-status", "400") as proxy, _client(proxy) as client:
        with pytest.raises(openai.BadRequestError, match="the fake refuses"):
            await client.chat.completions.create(**STREAM)  # type: ignore[call-overload]
    async with surface("--stream-error") as proxy, _client(proxy) as client:
        with pytest.raises(openai.APIError, match="the fake failed"):
            async for _ in await client.chat.completions.create(**STREAM):  # type: ignore[call-overload]
                pass


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/completion"])
async def test_engine_dies_in_mid_stream(path: str) -> None:
    """After the first byte, an error event ends the stream, without [DONE]."""
    async with surface("--truncate-after-chunks", "3", "--slow-chunks", "0.02") as proxy:
        status, _, body = await proxy.post(path, {**STREAM, "prompt": "x"})
        events = _events(body)
        assert status == 200
        assert "closed the stream" in events[-1]["error"]["message"]
        assert "[DONE]" not in events
        assert body.endswith(b"\n\n")


async def test_engine_dies_before_the_answer() -> None:
    """Before the first byte it is a 502 with a JSON error, and the next request is served."""
    async with surface(limits=Limits(connect_retry_s=0.1)) as proxy:
        moved = proxy.backend.socket.rename(proxy.backend.socket.with_suffix(".gone"))
        status, _, body = await proxy.post("/v1/chat/completions", STREAM)
        assert status == 502
        assert json.loads(body)["error"]["code"] == 502
        moved.rename(proxy.backend.socket)
        assert (await proxy.post("/v1/chat/completions", STREAM))[0] == 200


async def test_refused_connection_is_tried_again() -> None:
    """An engine that is just being restarted costs time, not an error: nothing was sent."""
    async with surface() as proxy:
        moved = proxy.backend.socket.rename(proxy.backend.socket.with_suffix(".gone"))
        asking = asyncio.create_task(proxy.post("/v1/chat/completions", CHAT))
        await asyncio.sleep(0.06)
        moved.rename(proxy.backend.socket)
        assert (await asking)[0] == 200


@pytest.mark.parametrize(("lives", "status"), [(2, 200), (3, 502)])
async def test_a_dying_engine_takes_a_connection(lives: int, status: int) -> None:
    """A request that a dying engine took and dropped at once is sent once more, and not more than once."""
    async with surface() as proxy:
        path = proxy.backend.socket
        alive = path.rename(path.with_suffix(".alive"))
        dropped = 0

        async def drop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal dropped
            await reader.readline()
            writer.close()
            dropped += 1
            if dropped == lives - 1:
                path.unlink()
                alive.rename(path)

        async with await asyncio.start_unix_server(drop, path):
            assert (await proxy.post("/v1/chat/completions", CHAT))[0] == status
        assert dropped == min(lives - 1, 2)
        assert (await proxy.post("/v1/chat/completions", CHAT))[0] == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
@pytest.mark.parametrize("switch", ["--hang", "--hang-after-chunks"])
async def test_client_gone(path: str, switch: str) -> None:
    """A client that leaves, before or after the first byte, closes the engine's connection."""
    async with surface(switch, *(["2"] if "after" in switch else [])) as proxy:
        if "after" in switch:
            async with proxy.http.post(proxy.url + path, json=STREAM) as response:
                await response.content.readany()
                response.close()
        else:
            asking = asyncio.create_task(proxy.post(path, STREAM))
            await eventually(lambda: proxy.fake.requests)
            asking.cancel()
        await eventually(lambda: proxy.fake.requests[0].disconnected, 1.0)
        await eventually(lambda: proxy.observer.ended == [proxy.observer.begun[0][0]])
        assert proxy.context.metrics.requests()["active"] == 0


async def test_remote_image_and_bad_json() -> None:
    """Remote images and bodies that cannot be understood, so cannot be judged, never reach the engine."""
    part = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}
    body = {"messages": [{"role": "user", "content": [part]}]}
    async with surface() as proxy:
        for path in ("/v1/chat/completions", "/v1/messages", "/apply-template", "/v1/messages/count_tokens"):
            assert (await proxy.post(path, body))[0] == 400
        for raw in (
            b"",
            b"{",
            b"[]",
            b"[" * 100_000,
            b'{"a": NaN}',
            b'{"seed": ' + b"1" * 5000 + b"}",
            b"\xff",
        ):
            async with proxy.http.post(proxy.url + "/v1/chat/completions", data=raw) as response:
                assert response.status == 400
                assert (await response.json())["error"]["type"] == "invalid_request_error"
        assert proxy.fake.requests == []


async def test_other_routes() -> None:
    """Tokens, template and what the engine says of itself go through; models are ours."""
    body = {"content": "a b", "tokens": [1], "input": "a", "messages": []}
    async with surface() as proxy:
        for path in ("/tokenize", "/detokenize", "/apply-template", "/v1/embeddings"):
            assert (await proxy.post(path, body))[0] == 200
        for path in ("/props", "/slots"):
            assert (await proxy.get(path))[0] == 200
        seen = len(proxy.fake.requests)
        _, _, body = await proxy.get("/v1/models")
        assert json.loads(body)["data"][0]["id"] == "planted-moe:latest"
        assert len(proxy.fake.requests) == seen


async def test_held_stream_is_kept_alive() -> None:
    """A streaming client that waits long gets 200 and comments; then the answer, or the failure in-band."""
    limits = Limits(header_wait_s=0.02, keep_alive_s=0.02)
    for error in (None, EngineGoneError("out of memory")):
        async with surface(limits=limits, ready=False) as proxy:
            async with proxy.http.post(proxy.url + "/v1/chat/completions", json=STREAM) as response:
                assert response.status == 200
                assert (await response.content.readany()).startswith(b": ")
                proxy.backend.error = error
                proxy.backend.gate.set()
                last = _events(await response.read())[-1]
            assert last == "[DONE]" if error is None else last["error"]["message"] == "out of memory"


def _form(path: str) -> SseForm:
    return SseForm(path, family_of(path))


ENDINGS = [
    ("/v1/chat/completions", b'data: {"a":1}\n\ndata: [DONE]\n\n', True),
    ("/v1/chat/completions", b'data: {"a":"\\ndata: [DONE]"}\n\n', False),
    ("/v1/chat/completions", b'data: {"error": {"code": 500}}\n\n', True),
    ("/v1/chat/completions", b"", False),
    ("/v1/messages", b'event: message_stop\ndata: {"type":"message_stop"}\n\n', True),
    ("/v1/messages", b'event: content_block_stop\ndata: {"x":"event: message_stop"}\n\n', False),
    ("/v1/messages", b"event: error\ndata: {}\n\n", True),
    ("/v1/responses", b"event: response.completed\ndata: {}\n\n", True),
    ("/completion", b'data: {"content":"","stop":true}\n\n', True),
    ("/completion", b'data: {"content":"\\"stop\\":true","stop":false}\n\n', False),
    ("/v1/embeddings", b"whatever", True),
]


@given(st.sampled_from(ENDINGS), st.lists(st.integers(0, 100), max_size=5))
def test_proper_end(ending: tuple[str, bytes, bool], places: list[int]) -> None:
    """Whether a stream came to its proper end is seen wherever it is cut; text cannot look like an end."""
    path, data, complete = ending
    form = _form(path)
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    for start, end in pairwise(edges):
        assert form.feed(data[start:end]) == data[start:end]
    if complete:
        assert form.end() == b""
    else:
        with pytest.raises(EngineGoneError):
            form.end()


def test_error_after_half_an_event() -> None:
    """An error is an event of its own, also in the middle of another; each family has its form."""
    form = _form("/v1/chat/completions")
    form.feed(b'data: {"choices": [{"del')
    assert form.failure(EngineGoneError("gone")).startswith(
        b'\n\ndata: {"error":{"code":502,"message":"gone"'
    )
    form.feed(b'data: {"a":1}\n\n')
    assert form.failure(EngineGoneError("gone")).startswith(b"data: ")
    for path in ("/v1/messages", "/v1/responses"):
        failure = _form(path).failure(EngineGoneError("gone"))
        assert failure.startswith(b'event: error\ndata: {"type":"error"')
