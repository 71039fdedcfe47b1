"""Ollama's API as its clients meet it, over the whole surface."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from pathlib import Path
from typing import Any

import ollama
import pytest

from moe_proxy.model.gguf_header import TensorInfo
from moe_proxy.proxy.context import Limits
from tests.support.surface import (
    CHAT,
    DIGEST,
    HELLO,
    BackendState,
    card,
    eventually,
    header,
    lines_of,
    surface,
)

SERVED = "this server has planted-moe:latest"
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
]


async def test_ollama_client_chat() -> None:
    """The official client: chat, streaming and not, with thinking, tool calls and figures."""
    async with surface("--reasoning", "hm hm", "--tool-call") as proxy:
        client = ollama.AsyncClient(host=proxy.url)
        whole = await client.chat(model="planted-moe", messages=HELLO, think=True)
        assert whole.message.content == proxy.fake.switches.reply
        assert whole.message.thinking == "hm hm"
        assert (whole.done, whole.done_reason, whole.model) == (True, "stop", "planted-moe")
        assert whole.eval_count == 10
        assert whole.prompt_eval_count
        assert whole.total_duration
        parts = [part async for part in await client.chat(model="planted-moe", messages=HELLO, stream=True)]
        assert "".join(part.message.content or "" for part in parts) == proxy.fake.switches.reply
        assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
        for stream in (False, True):
            answer: Any = await client.chat("planted-moe", HELLO, tools=TOOLS, stream=stream)
            calls = [
                call
                for part in ([piece async for piece in answer] if stream else [answer])
                for call in part.message.tool_calls or ()
            ]
            assert [call.function.name for call in calls] == ["weather"]
            assert calls[0].function.arguments == {"city": "Oslo"}
        sent = proxy.fake.requests[0].body
        assert isinstance(sent, dict)
        assert sent["chat_template_kwargs"] == {"enable_thinking": True}
        await client._client.aclose()


async def test_ollama_client_other_calls() -> None:
    """The official client: generate, raw, suffix, embed, embeddings, list, show, ps, pull."""
    async with surface() as proxy:
        client = ollama.AsyncClient(host=proxy.url)
        reply = proxy.fake.switches.reply
        made = await client.generate("planted-moe", "hello", system="be kind")
        assert (made.response, made.context, made.done) == (reply, [], True)
        parts = [part async for part in await client.generate("planted-moe", "hello", stream=True)]
        assert "".join(part.response for part in parts) == reply
        assert (await client.generate("planted-moe", "hello", raw=True)).response == reply
        cut = await client.generate("planted-moe", "a", suffix="b", options={"num_predict": 2})
        assert (cut.done_reason, cut.eval_count) == ("length", 2)
        paths = [seen.path for seen in proxy.fake.requests]
        assert paths == ["/v1/chat/completions", "/v1/chat/completions", "/completion", "/infill"]
        vectors = (await client.embed("planted-moe", ["a", "b"])).embeddings
        assert [round(sum(x * x for x in vector), 6) for vector in vectors] == [1.0, 1.0]
        assert (await client.embed("planted-moe", [])).embeddings == []
        assert len((await client.embeddings("planted-moe", "a")).embedding) > 1
        assert (await client.list()).models[0].model == "planted-moe:latest"
        shown = await client.show("planted-moe")
        assert shown.modelinfo is not None
        assert shown.modelinfo["qwen3moe.context_length"] == 4096
        assert (await client.ps()).models[0].context_length == 4096
        assert (await client.pull("planted-moe")).status == "success"
        steps = [step.status async for step in await client.pull("planted-moe", stream=True)]
        assert steps[-1] == "success"
        await client._client.aclose()


async def test_ollama_client_sees_errors() -> None:
    """Errors before and after the first byte are raised by the official client, with their own words."""
    async with surface("--stream-error") as proxy:
        client = ollama.AsyncClient(host=proxy.url)
        with pytest.raises(ollama.ResponseError) as caught:
            await client.chat("other", HELLO)
        assert caught.value.status_code == 404
        assert caught.value.error == "model 'other' not found: this server has planted-moe:latest"
        with pytest.raises(ollama.ResponseError, match="the fake failed"):
            async for _ in await client.chat("planted-moe", HELLO, stream=True):
                pass
        with pytest.raises(ollama.ResponseError, match="the fake failed") as caught:
            await client.chat("planted-moe", HELLO)
        assert caught.value.status_code == 500
        await client._client.aclose()


async def test_stream_by_default_and_content_types() -> None:
    """No ``stream`` means a stream, without blank lines; whole replies say charset; bodies need no type."""
    async with surface("--ping") as proxy:
        data = json.dumps(CHAT).encode()
        headers = {"Content-Type": "text/plain"}
        async with proxy.http.post(proxy.url + "/api/chat", data=data, headers=headers) as response:
            assert response.headers["Content-Type"] == "application/x-ndjson"
            assert lines_of(await response.read())[-1]["done"] is True
        async with proxy.http.post(proxy.url + "/api/chat", json={**CHAT, "stream": False}) as response:
            assert response.headers["Content-Type"] == "application/json; charset=utf-8"
            assert response.content_length is not None


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        ("/api/chat", {}, 400, "model is required"),
        ("/api/chat", {**CHAT, "model": "m"}, 404, f"model 'm' not found: {SERVED}"),
        ("/api/show", {"name": "m"}, 404, f"model 'm' not found: {SERVED}"),
        ("/api/embed", {"model": "m"}, 404, f'model "m" not found, try pulling it first: {SERVED}'),
        ("/api/embeddings", {"model": "m"}, 404, f'model "m" not found, try pulling it first: {SERVED}'),
        ("/api/chat", {**CHAT, "options": {"num_ctx": "x"}}, 400, 'option "num_ctx" must be of type integer'),
        ("/api/create", {}, 501, "not supported by moe-proxy"),
        ("/api/push", {}, 501, "not supported by moe-proxy"),
        ("/api/copy", {}, 501, "not supported by moe-proxy"),
        ("/api/blobs/sha256:ab", {}, 501, "not supported by moe-proxy"),
        ("/api/nothing", {}, 404, "there is no route /api/nothing"),
        ("/api/tags", {}, 405, "/api/tags does not take POST"),
    ],
)
async def test_ollama_errors(path: str, body: Any, status: int, error: str) -> None:
    """Errors before the first byte have their real status and a text, never an object."""
    async with surface() as proxy:
        assert await proxy.ask(path, body) == (status, {"error": error})


async def test_missing_body_and_unknown_pull() -> None:
    """An empty body and a model that is not here are said in Ollama's form."""
    async with surface() as proxy:
        async with proxy.http.post(proxy.url + "/api/chat") as response:
            assert (response.status, await response.json()) == (400, {"error": "missing request body"})
        status, body = await proxy.ask("/api/pull", {"model": "llama3"})
        assert status == 501
        assert "llama3" in body["error"]


async def test_any_model_name() -> None:
    """With the policy ``any``, an unknown name is served and echoed; the engine hears its own alias."""
    async with surface(unknown_model="any", model=card(upstream_name="up")) as proxy:
        status, body = await proxy.ask("/api/chat", {**CHAT, "model": "whatever:7b", "stream": False})
        assert (status, body["model"]) == (200, "whatever:7b")
        assert isinstance(proxy.fake.requests[0].body, dict)
        assert proxy.fake.requests[0].body["model"] == "up"
    async with surface(unknown_model_openai="strict") as proxy:
        status, body = await proxy.ask("/v1/chat/completions", {**CHAT, "model": "whatever"})
        assert (status, body["error"]["type"]) == (404, "not_found_error")


async def test_wrong_requests_are_no_failures() -> None:
    """A client's error, refused here or by the engine, is a 4xx and no failure of the service."""
    async with surface() as proxy:
        for path, asked in (
            ("/api/chat", {**CHAT, "model": "llama3"}),
            ("/api/chat", {**CHAT, "options": {"top_k": "many"}}),
            ("/v1/chat/completions", {"messages": 1}),
            ("/v1/chat/completions", {"messages": 1, "stream": True}),
        ):
            status, _ = await proxy.ask(path, asked)
            assert 400 <= status < 500
        assert proxy.context.metrics.requests()["total"] == 4
        assert proxy.context.metrics.requests()["failed"] == 0


async def test_engine_dies_in_mid_stream() -> None:
    """In a stream the last line says what happened, and there is no done; a whole reply is a 502."""
    async with surface("--truncate-after-chunks", "3", "--slow-chunks", "0.02") as proxy:
        status, _, body = await proxy.post("/api/chat", CHAT)
        lines = lines_of(body)
        assert status == 200
        assert "closed the stream" in lines[-1]["error"]
        assert not any(line.get("done") for line in lines)
        asked = {"model": "planted-moe", "prompt": "x", "stream": False}
        status, whole = await proxy.ask("/api/generate", asked)
        assert status == 502
        assert "closed the stream" in whole["error"]
        assert proxy.context.metrics.requests()["failed"] == 2


@pytest.mark.parametrize("stream", [True, False])
async def test_engine_refuses(stream: bool) -> None:
    """The engine's own status and message reach Ollama's clients as a text; garbage is an error too."""
    async with surface("--error-status", "400") as proxy:
        answer = await proxy.ask("/api/chat", {**CHAT, "stream": stream})
        assert answer == (400, {"error": "the fake refuses"})
    async with surface("--garbage") as proxy:
        status, body = await proxy.ask("/api/chat", {**CHAT, "stream": stream})
        assert (status, body) == (503, {"error": "llama-server did not answer with a stream"})


async def test_information_never_waits() -> None:
    """Tags, version, show, ps, the root and health answer while the engine loads, and never ask it."""
    async with surface(ready=False) as proxy:
        proxy.backend.status = BackendState("loading", "", 0.5)
        assert (await proxy.get("/"))[2] == b"Ollama is running"
        async with proxy.http.head(proxy.url + "/") as response:
            assert response.status == 200
        _, _, body = await proxy.get("/api/version")
        assert all(part.isdigit() for part in json.loads(body)["version"].split("."))
        _, _, body = await proxy.get("/api/tags")
        model = json.loads(body)["models"][0]
        assert (model["name"], model["model"], model["digest"]) == ("planted-moe:latest",) * 2 + (DIGEST,)
        assert model["details"] == {
            "parent_model": "", "format": "gguf", "family": "qwen3moe", "families": ["qwen3moe"],
            "parameter_size": "30.5B", "quantization_level": "Q4_K_M",
        }  # fmt: skip
        status, shown = await proxy.ask("/api/show", {"name": "planted-moe"})
        assert status == 200
        assert shown["template"] == header().chat_template
        keys = [key for key in shown["model_info"] if "context_length" in key]
        assert keys[0] == "qwen3moe.context_length"
        assert {"license", "modelfile", "parameters", "details", "capabilities", "modified_at"} <= set(shown)
        _, _, body = await proxy.get("/api/ps")
        assert json.loads(body) == {"models": []}
        status, _, body = await proxy.get("/health")
        assert (status, json.loads(body)["state"], json.loads(body)["progress"]) == (503, "loading", 0.5)
        assert (await proxy.get("/livez"))[0] == 200
        assert proxy.fake.requests == []


async def test_raw_images_reach_the_engine() -> None:
    """Raw with images asks /props for the marker and sends the prompt in llama-server's form."""
    png = base64.b64encode(b"\x89PNG\r\n\x1a\n0000").decode()
    async with surface(model=card(capabilities=("completion", "vision"))) as proxy:
        asked = {"model": "planted-moe", "prompt": "see", "images": [png], "raw": True, "stream": False}
        status, body = await proxy.ask("/api/generate", asked)
        assert (status, body["response"]) == (200, proxy.fake.switches.reply)
        assert [seen.path for seen in proxy.fake.requests] == ["/props", "/completion"]
        sent = proxy.fake.requests[1].body
        assert isinstance(sent, dict)
        assert sent["prompt"] == {"prompt_string": "<__fake_media__>see", "multimodal_data": [png]}


async def test_show_verbose() -> None:
    """Show names the licence; verbose adds every tensor with its type and shape."""
    tensor = TensorInfo("blk.0.ffn_up_exps.weight", (64, 32, 8), "Q4_K", 9216, 0, Path("m.gguf"))
    made = header(tensors=(tensor,), metadata={"general.license": "apache-2.0"})
    async with surface(model=card(header=made)) as proxy:
        _, brief = await proxy.ask("/api/show", {"model": "planted-moe"})
        assert brief["license"] == "apache-2.0"
        assert "tensors" not in brief
        _, whole = await proxy.ask("/api/show", {"model": "planted-moe", "verbose": True})
        assert whole["tensors"] == [{"name": tensor.name, "type": "Q4_K", "shape": [64, 32, 8]}]
        status, body = await proxy.ask("/api/show", {"model": "planted-moe", "verbose": "yes"})
        assert (status, body["error"]) == (400, "verbose must be true or false")


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_load_and_unload(path: str) -> None:
    """No prompt: one object, sent when the model is ready; with keep_alive 0 it says unload."""
    unloaded = []

    def unload() -> None:
        unloaded.append(True)

    async with surface(ready=False, unload=unload) as proxy:
        asking = asyncio.create_task(proxy.ask(path, {"model": "planted-moe"}))
        await eventually(lambda: proxy.context.metrics.requests()["active"] == 1)
        assert not asking.done()
        proxy.backend.gate.set()
        status, body = await asking
        assert (status, body["done"], body["done_reason"]) == (200, True, "load")
        assert body.get("response", body.get("message", {}).get("content")) == ""
        _, body = await proxy.ask(path, {"model": "planted-moe", "keep_alive": 0})
        assert body["done_reason"] == "unload"
        await eventually(lambda: unloaded == [True])
        assert proxy.fake.requests == []


async def test_held_requests() -> None:
    """While loading, a stream gets empty chunks, never a blank line; load_duration tells how long."""
    async with surface(ready=False, limits=Limits(header_wait_s=0.02, keep_alive_s=0.02)) as proxy:
        async with proxy.http.post(proxy.url + "/api/chat", json=CHAT) as response:
            first = lines_of(await response.content.readany())[0]
            assert (first["message"]["content"], first["done"]) == ("", False)
            proxy.backend.gate.set()
            last = lines_of(await response.read())[-1]
        assert last["done"] is True
        assert last["load_duration"] > 10_000_000


async def test_a_long_tool_call_keeps_the_client() -> None:
    """A call goes out whole; while the engine writes it, the client gets empty chunks, never a blank line."""
    body = {**CHAT, "tools": TOOLS}
    switches = ("--tool-call", "--reply", "")
    async with (
        surface(*switches, "--hang-after-chunks", "2", limits=Limits(keep_alive_s=0)) as proxy,
        proxy.http.post(proxy.url + "/api/chat", json=body) as response,
    ):
        line = lines_of(await response.content.readline())[0]
        assert line["message"] == {"role": "assistant", "content": ""}
        assert not line["done"]
        response.close()
    async with surface(*switches) as proxy:
        _, _, answer = await proxy.post("/api/chat", body)
        assert [line["done"] for line in lines_of(answer)] == [False, True]


async def test_what_is_ignored_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Unknown options, a num_ctx that is too large, a keep_alive that is not heeded: ignored, and logged."""
    body = {**CHAT, "stream": False, "options": {"num_ctx": 32768, "mirror": 1}, "keep_alive": "5m"}
    async with surface() as proxy:
        for _ in range(3):
            assert (await proxy.post("/api/chat", body))[0] == 200
    said = sorted(record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    assert said == [
        "a request to /api/chat: num_ctx 32768 is ignored: the model runs with 4096",
        "a request to /api/chat: option 'mirror' is unknown and ignored",
        "keep_alive of requests is ignored, the model stays loaded: see keep_alive_policy",
    ]
