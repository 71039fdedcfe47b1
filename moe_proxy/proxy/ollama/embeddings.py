"""Owns ``/api/embed`` and ``/api/embeddings``: texts to vectors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import web

from moe_proxy.errors import EngineError, RequestError, UnsupportedError
from moe_proxy.proxy.admission import Ticket
from moe_proxy.proxy.exchange import Exchange
from moe_proxy.proxy.ollama import models
from moe_proxy.proxy.ollama.request import flag, keep_alive
from moe_proxy.proxy.passthrough import forwarded_headers
from moe_proxy.proxy.replies import dump, json_reply, refusal

Vector = list[float]

_UNKNOWN = 'model "{}" not found, try pulling it first'
_BATCH_SIZE = re.compile(r"too large to process\..*\(current batch size: (\d+)\)", re.DOTALL)
_CONTEXT_SIZE = re.compile(r"context size \((\d+)\s+tokens\)")


@dataclass(frozen=True)
class Embedded:
    """Vectors in the order of the texts, the tokens read for them, and how long the request was held."""

    vectors: list[Vector]
    tokens: int
    held_ns: int = 0


async def embed(exchange: Exchange) -> web.StreamResponse:
    """POST /api/embed: vectors of length 1."""
    with exchange.admission.admitted() as ticket:
        _, body = await exchange.json_object()
        model = models.check_ollama(exchange.context, body.get("model"), _UNKNOWN)
        given = body.get("input") or []
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise RequestError("input must be a string or an array of strings")
        dimensions = body.get("dimensions") or None
        if isinstance(dimensions, bool) or not isinstance(dimensions, int | None) or (dimensions or 1) < 1:
            raise RequestError("dimensions must be a positive integer")
        truncate = flag(body, "truncate", default=True)
        exchange.admission.keep_alive.asked(keep_alive(body.get("keep_alive")))
        if not texts:
            return json_reply({"model": model, "embeddings": []})
        embedded = await _embedded(exchange, ticket, texts, truncate=truncate)
        return json_reply(
            {
                "model": model,
                "embeddings": [unit(vector[:dimensions]) for vector in embedded.vectors],
                "total_duration": exchange.context.clocks.monotonic_ns() - exchange.started_ns,
                "load_duration": embedded.held_ns,
                "prompt_eval_count": embedded.tokens,
            }
        )


async def embeddings(exchange: Exchange) -> web.StreamResponse:
    """POST /api/embeddings, the older form: one text, its vector as it is."""
    with exchange.admission.admitted() as ticket:
        _, body = await exchange.json_object()
        models.check_ollama(exchange.context, body.get("model"), _UNKNOWN)
        prompt = body.get("prompt") or ""
        if not isinstance(prompt, str):
            raise RequestError("prompt must be a string")
        exchange.admission.keep_alive.asked(keep_alive(body.get("keep_alive")))
        if not prompt:
            return json_reply({"embedding": []})
        embedded = await _embedded(exchange, ticket, [prompt], truncate=True)
        return json_reply({"embedding": embedded.vectors[0]})


def unit(vector: Vector) -> Vector:
    """``vector`` with Euclidean length 1; a null vector stays one."""
    length = math.sqrt(math.fsum(value * value for value in vector))
    return [value / length for value in vector] if length else vector


def vectors_of(raw: bytes, count: int) -> Embedded:
    """llama-server's answer to ``count`` texts. Raises EngineError when it is not one."""
    try:
        value = json.loads(raw)
        items = sorted(value["data"], key=lambda item: item["index"])
        vectors = [[float(number) for number in item["embedding"]] for item in items]
        tokens = int(value.get("usage", {}).get("prompt_tokens", 0))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"llama-server's embeddings are not understood: {raw[:80]!r}") from error
    if len(vectors) != count:
        raise EngineError(f"llama-server sent {len(vectors)} embeddings for {count} texts")
    return Embedded(vectors, tokens)


def limit_of(raw: bytes) -> int | None:
    """The tokens that an input may have, from llama-server's error about one that is too long; else None.

    A model whose context has to see a text as a whole is bounded by the batch, others by the context, which
    must have room for one more.
    """
    try:
        error = json.loads(raw)["error"]
        message, kind = str(error["message"]), error.get("type")
        batch = _BATCH_SIZE.search(message)
        if batch:
            return int(batch[1])
        context = _CONTEXT_SIZE.search(message) if kind == "exceed_context_size_error" else None
        return int(context[1]) - 1 if context else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


async def _embedded(exchange: Exchange, ticket: Ticket, texts: list[str], *, truncate: bool) -> Embedded:
    """Vectors of ``texts``; those that are too long are cut to what the engine takes, if ``truncate``."""
    call = {"model": models.upstream_name(exchange.context.model), "encoding_format": "float"}
    with ticket.cuttable():
        status, raw, held_ns = await _ask(exchange, "/v1/embeddings", {**call, "input": texts})
        limit = limit_of(raw) if status != 200 else None
        if limit is not None and truncate:
            fitting = [await _fitting(exchange, text, limit) for text in texts]
            status, raw, _ = await _ask(exchange, "/v1/embeddings", {**call, "input": fitting})
            limit = limit_of(raw) if status != 200 else None
    if limit is not None:
        raise RequestError("the input length exceeds the context length")
    if status != 200:
        error = refusal(status, raw)
        if error.openai_type == "not_supported_error":
            raise UnsupportedError(
                "this model does not support embeddings", "start moe-proxy with: -- --embeddings"
            )
        raise error
    embedded = vectors_of(raw, len(texts))
    return Embedded(embedded.vectors, embedded.tokens, held_ns)


async def _fitting(exchange: Exchange, text: str, limit: int) -> str | list[object]:
    """``text``, or its first ``limit`` tokens when it has more."""
    status, raw, _ = await _ask(exchange, "/tokenize", {"content": text, "add_special": True})
    try:
        tokens = json.loads(raw)["tokens"] if status == 200 else None
    except (ValueError, KeyError, TypeError):
        tokens = None
    if not isinstance(tokens, list):
        raise EngineError(f"llama-server's tokens are not understood: {raw[:80]!r}")
    return text if len(tokens) <= limit else tokens[:limit]


async def _ask(exchange: Exchange, path: str, body: Mapping[str, object]) -> tuple[int, bytes, int]:
    """Status, body, and how long the request was held."""
    headers = forwarded_headers(exchange.request.headers, exchange.id, has_body=True)
    answer = await exchange.upstream.send("POST", path, headers, dump(body))
    try:
        return answer.status, await answer.read(), answer.held_ns
    finally:
        answer.close()
