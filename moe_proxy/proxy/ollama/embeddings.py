"""Owns ``/api/embed`` and ``/api/embeddings``: texts to vectors."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from aiohttp import web

from moe_proxy.errors import EngineError, RequestError, UnsupportedError
from moe_proxy.proxy.admission import Ticket
from moe_proxy.proxy.exchange import Exchange
from moe_proxy.proxy.ollama import models
from moe_proxy.proxy.passthrough import forwarded_headers
from moe_proxy.proxy.replies import dump, json_reply, refusal

Vector = list[float]


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
        model = models.check_ollama(exchange.context, body.get("model"))
        given = body.get("input")
        texts = [given] if isinstance(given, str) else given or []
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise RequestError("input must be a string or an array of strings")
        dimensions = body.get("dimensions") or None
        if dimensions is not None and (not isinstance(dimensions, int) or dimensions < 1):
            raise RequestError("dimensions must be a positive integer")
        if not texts:
            return json_reply({"model": model, "embeddings": []})
        embedded = await _embedded(exchange, ticket, texts)
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
        models.check_ollama(exchange.context, body.get("model"))
        prompt = body.get("prompt") or ""
        if not isinstance(prompt, str):
            raise RequestError("prompt must be a string")
        if not prompt:
            return json_reply({"embedding": []})
        return json_reply({"embedding": (await _embedded(exchange, ticket, [prompt])).vectors[0]})


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


async def _embedded(exchange: Exchange, ticket: Ticket, texts: list[str]) -> Embedded:
    call = {"model": models.upstream_name(exchange.context.model), "input": texts, "encoding_format": "float"}
    headers = forwarded_headers(exchange.request.headers, exchange.id, has_body=True)
    with ticket.cuttable():
        answer = await exchange.upstream.send("POST", "/v1/embeddings", headers, dump(call))
        try:
            raw = await answer.read()
        finally:
            answer.close()
    if answer.status != 200:
        error = refusal(answer.status, raw)
        if error.openai_type == "exceed_context_size_error":
            raise RequestError("the input length exceeds the context length")
        if error.openai_type == "not_supported_error":
            raise UnsupportedError("this model does not support embeddings")
        raise error
    embedded = vectors_of(raw, len(texts))
    return Embedded(embedded.vectors, embedded.tokens, answer.held_ns)
