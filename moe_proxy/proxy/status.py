"""Owns what the proxy says of itself: health, statistics, metrics, and the model in OpenAI's form.

Health and the model never wait for the engine; the statistics ask it, for a bounded time. Truthful: ready
means that a request sent now would be computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from aiohttp import web

from moe_proxy import metrics
from moe_proxy.errors import ModelNotFoundError, MoeProxyError
from moe_proxy.proxy import openapi
from moe_proxy.proxy.exchange import Exchange
from moe_proxy.proxy.ollama import models
from moe_proxy.proxy.replies import json_reply

# An engine in the middle of a long batch answers when it is through; whoever scrapes does not wait for that.
_ENGINE_METRICS_S = 1.0


def state_and_reason(exchange: Exchange) -> tuple[str, str]:
    """What the engine does, as far as requests are concerned, and why if that is not what they need."""
    if exchange.admission.draining:
        return "draining", "the proxy is shutting down"
    status = exchange.context.backend.status
    return status.state.lower(), status.reason


async def health(exchange: Exchange) -> web.StreamResponse:
    """GET /health: 200 when ready, or asleep until it is asked; else 503 with the state and its reason."""
    state, reason = state_and_reason(exchange)
    if state in ("ready", "asleep"):
        return json_reply({"status": "ok", "state": state})
    reason = reason or f"the engine is {state}"
    error = {"code": 503, "message": reason, "type": "unavailable_error"}
    body = {
        "status": "unavailable",
        "state": state,
        "reason": reason,
        "progress": exchange.context.backend.status.progress,
        "error": error,
    }
    return json_reply(body, 503)


async def livez(exchange: Exchange) -> web.StreamResponse:
    """GET /livez: this process answers."""
    return json_reply({"status": "alive"})


async def stats(exchange: Exchange) -> web.StreamResponse:
    """GET /stats: the JSON behind ``moe-proxy stats``."""
    return json_reply(await exchange.context.stats())


async def prometheus(exchange: Exchange) -> web.StreamResponse:
    """GET /metrics. Without the statistics, what the proxy counts itself is still there."""
    context = exchange.context
    numbers: Mapping[str, object] = {}
    with exchange.admission.beside("stats"):
        numbers = await context.stats()
    body = context.metrics.render(numbers) + metrics.engine_lines(await _engine_metrics(exchange))
    return web.Response(body=body, headers={"Content-Type": metrics.CONTENT_TYPE})


async def _engine_metrics(exchange: Exchange) -> bytes:
    """llama-server's own metrics; empty when it is not ready or does not tell them in time."""
    if exchange.context.backend.status.state != "ready":
        return b""
    try:
        return await asyncio.wait_for(_engine_says(exchange, "/metrics"), _ENGINE_METRICS_S)
    except (MoeProxyError, asyncio.TimeoutError, TimeoutError):
        exchange.context.metrics.step_failed("engine metrics")
        return b""


async def _engine_says(exchange: Exchange, path: str) -> bytes:
    answer = await exchange.upstream.send("GET", path, {"Host": "localhost"}, None)
    try:
        return await answer.read() if answer.status == 200 else b""
    finally:
        answer.close()


async def described(exchange: Exchange) -> web.StreamResponse:
    """GET /openapi.json."""
    return json_reply(openapi.description())


async def openai_models(exchange: Exchange) -> web.StreamResponse:
    """GET /v1/models."""
    return json_reply(models.openai_models(exchange.context.model))


async def openai_model(exchange: Exchange) -> web.StreamResponse:
    """GET /v1/models/{id}."""
    card = exchange.context.model
    name = exchange.name
    if not models.is_served(card, name):
        raise ModelNotFoundError(f"the model {name!r} does not exist", f"this one does: {card.name}")
    return json_reply(models.openai_model(card))
