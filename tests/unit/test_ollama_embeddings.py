"""Texts to vectors: both of Ollama's forms, texts that are too long, models that cannot."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest

from moe_proxy.proxy.ollama.embeddings import limit_of, unit
from tests.support.surface import Surface, eventually, surface

LONG = "one two three four five six"


async def _ask(proxy: Surface, path: str, body: Any) -> tuple[int, Any]:
    status, _, answer = await proxy.post(path, {"model": "planted-moe", **body})
    return status, json.loads(answer)


async def test_embed() -> None:
    """Vectors of length 1 in the order of the texts, with the tokens read and the times."""
    async with surface() as proxy:
        status, body = await _ask(proxy, "/api/embed", {"input": ["a", "bb"]})
        assert status == 200
        assert body["model"] == "planted-moe"
        assert [math.hypot(*vector) for vector in body["embeddings"]] == pytest.approx([1.0, 1.0])
        assert body["embeddings"][0] != body["embeddings"][1]
        assert body["prompt_eval_count"] == 2
        assert body["total_duration"] > 0
        for empty in ([], "", None):
            assert await _ask(proxy, "/api/embed", {"input": empty}) == (
                200, {"model": "planted-moe", "embeddings": []},
            )  # fmt: skip


async def test_dimensions() -> None:
    """``dimensions`` cuts, and what is left has length 1 again."""
    async with surface() as proxy:
        _, whole = await _ask(proxy, "/api/embed", {"input": "abc"})
        _, cut = await _ask(proxy, "/api/embed", {"input": "abc", "dimensions": 2})
        assert cut["embeddings"][0] == pytest.approx(unit(whole["embeddings"][0][:2]))
        for bad in (-1, "2", 1.5, True):
            status, _ = await _ask(proxy, "/api/embed", {"input": "abc", "dimensions": bad})
            assert status == 400


async def test_truncate() -> None:
    """A text that is too long is cut to what the engine takes and sent again; the others are left alone."""
    async with surface("--embed-limit", "4") as proxy:
        status, body = await _ask(proxy, "/api/embed", {"input": ["short", LONG]})
        assert (status, len(body["embeddings"])) == (200, 2)
        paths = [seen.path for seen in proxy.fake.requests]
        assert paths == ["/v1/embeddings", "/tokenize", "/tokenize", "/v1/embeddings"]
        sent = proxy.fake.requests[-1].body
        assert isinstance(sent, dict)
        assert sent["input"] == ["short", [3, 3, 5, 4]]
        status, body = await _ask(proxy, "/api/embeddings", {"prompt": LONG})
        assert (status, len(body["embedding"])) == (200, 4)


async def test_no_truncate() -> None:
    """With ``truncate: false`` a text that is too long is a 400 in Ollama's words, and asked for once."""
    async with surface("--embed-limit", "4") as proxy:
        answer = await _ask(proxy, "/api/embed", {"input": LONG, "truncate": False})
        assert answer == (400, {"error": "the input length exceeds the context length"})
        assert [seen.path for seen in proxy.fake.requests] == ["/v1/embeddings"]


async def test_old_form() -> None:
    """/api/embeddings gives the vector as it is; an empty prompt has none."""
    async with surface() as proxy:
        assert await _ask(proxy, "/api/embeddings", {"prompt": "abc"}) == (
            200, {"embedding": [3.0, 1.0, 0.5, 0.25]},
        )  # fmt: skip
        assert await _ask(proxy, "/api/embeddings", {"prompt": ""}) == (200, {"embedding": []})


@pytest.mark.parametrize("body", [{"input": 3}, {"input": [3]}, {"input": "x", "truncate": "no"}])
async def test_bad_input(body: Any) -> None:
    """What is no text is a 400 and never reaches the engine."""
    async with surface() as proxy:
        status, answer = await _ask(proxy, "/api/embed", body)
        assert status == 400
        assert isinstance(answer["error"], str)
        assert proxy.fake.requests == []


async def test_model_without_embeddings() -> None:
    """An engine that was started without embeddings: 501 with a text that says so, and what to start with."""
    async with surface("--no-pooling") as proxy:
        for path in ("/api/embed", "/api/embeddings"):
            answer = await _ask(proxy, path, {"input": "x", "prompt": "x"})
            text = "this model does not support embeddings: start moe-proxy with: -- --embeddings"
            assert answer == (501, {"error": text})


async def test_client_goes_away() -> None:
    """A client that leaves while its text is read ends the request at the engine too."""
    async with surface("--embed-hang") as proxy:
        reading = proxy.http.post(proxy.url + "/api/embed", json={"model": "planted-moe", "input": "x"})
        task = asyncio.ensure_future(reading)
        await eventually(lambda: proxy.fake.requests)
        task.cancel()
        await eventually(lambda: proxy.fake.requests[0].disconnected)


@pytest.mark.parametrize(
    ("error", "limit"),
    [
        ({"message": "input (9 tokens) is too large to process. increase the physical batch size "
          "(current batch size: 512)", "type": "server_error"}, 512),
        ({"message": "request (9 tokens) exceeds the available context size (4096 tokens), try increasing it",
          "type": "exceed_context_size_error"}, 4095),
        ({"message": "input (9 tokens) is larger than the max context size (64 tokens). skipping",
          "type": "exceed_context_size_error"}, 63),
        ({"message": "context size (64 tokens)", "type": "server_error"}, None),
        ({"message": "oops", "type": "exceed_context_size_error"}, None),
        ("oops", None),
    ],
)  # fmt: skip
def test_limits(error: Any, limit: int | None) -> None:
    """The limit is read from each of llama-server's messages about a text that is too long."""
    assert limit_of(json.dumps({"error": error}).encode()) == limit
    assert limit_of(b"garbage") is None
