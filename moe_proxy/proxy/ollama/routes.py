"""Owns the handlers of ``/api/*``: what is asked of the engine when, and what never reaches it.

The translation itself is in ``request`` and ``response``; what is said of the model is in ``models``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from aiohttp import web

from moe_proxy.errors import EngineError, MoeProxyError, RequestError, UnsupportedError
from moe_proxy.proxy.admission import Ticket
from moe_proxy.proxy.context import ProxyContext
from moe_proxy.proxy.exchange import Exchange
from moe_proxy.proxy.ollama import models, request
from moe_proxy.proxy.ollama.response import Record, Reply, Translator, gathered
from moe_proxy.proxy.passthrough import forwarded_headers
from moe_proxy.proxy.relay import Opening, relay
from moe_proxy.proxy.replies import Family, dump, error_value, json_reply, refusal
from moe_proxy.proxy.upstream import Answer

Json = Mapping[str, object]
Translate = Callable[[str, Json, request.ModelFacts], request.Translation]


async def version(exchange: Exchange) -> web.StreamResponse:
    """GET /api/version: of the API that is spoken, three plain integers."""
    return json_reply({"version": exchange.context.ollama_version})


async def tags(exchange: Exchange) -> web.StreamResponse:
    """GET /api/tags."""
    return json_reply(models.tags(exchange.context.model))


async def ps(exchange: Exchange) -> web.StreamResponse:
    """GET /api/ps."""
    context = exchange.context
    loaded = context.backend.status.state == "ready"
    left_s = exchange.admission.keep_alive.left_s()
    return json_reply(models.running(context.model, loaded, context.clocks.wall_ns(), left_s))


async def show(exchange: Exchange) -> web.StreamResponse:
    """POST /api/show; older clients say ``name``."""
    _, body = await exchange.json_object()
    models.check_ollama(exchange.context, body.get("model") or body.get("name"))
    verbose = request.flag(body, "verbose", default=False)
    return json_reply(models.show(exchange.context.model, verbose=verbose))


async def pull(exchange: Exchange) -> web.StreamResponse:
    """POST /api/pull: the served model is there already, others are not fetched."""
    _, body = await exchange.json_object()
    name = body.get("model") or body.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError("model is required")
    if not models.is_served(exchange.context.model, name):
        raise UnsupportedError(
            f"moe-proxy downloads nothing for its clients: {name!r}",
            "its operator can, with moe-proxy model download, and start it with that --model",
        )
    steps = [{"status": "pulling manifest"}, {"status": "success"}]
    if body.get("stream") is False:
        return json_reply(steps[-1])
    lines = b"".join(dump(step) + b"\n" for step in steps)
    return web.Response(body=lines, content_type="application/x-ndjson")


async def refused(exchange: Exchange) -> web.StreamResponse:
    """Whatever would change models on this machine."""
    raise UnsupportedError("not supported by moe-proxy")


async def chat(exchange: Exchange) -> web.StreamResponse:
    """POST /api/chat."""
    return await _generate(exchange, request.chat, is_chat=True)


async def generate(exchange: Exchange) -> web.StreamResponse:
    """POST /api/generate."""
    return await _generate(exchange, request.generate, is_chat=False)


async def _generate(exchange: Exchange, translate: Translate, *, is_chat: bool) -> web.StreamResponse:
    with exchange.admission.admitted() as ticket:
        raw, body = await exchange.json_object()
        model = models.check_ollama(exchange.context, body.get("model"))
        facts = _facts(exchange.context)
        translation = await exchange.aside(len(raw), lambda: translate(model, body, facts))
        for warning in translation.warnings:
            exchange.admission.notices.say(f"a request to {exchange.path}: {warning}")
        if not exchange.admission.keep_alive.asked(translation.keep_alive_s) and not translation.unloads:
            exchange.admission.notices.say(
                "keep_alive of requests is ignored, the model stays loaded: see keep_alive_policy"
            )
        translator = Translator(Reply(model, is_chat, exchange.started_ns), exchange.context.clocks)
        if translation.call is None:
            return await _load(exchange, ticket, translation, translator)
        call = translation.call
        with exchange.observed(await exchange.classified(body)):
            opening = _opened(exchange, call)
            if translation.stream:
                return await relay(exchange, ticket, opening, NdjsonForm(translator), patient=True)
            with ticket.cuttable():
                return await _whole(opening, translator)


async def _opened(exchange: Exchange, call: request.EngineCall) -> Answer:
    """Send ``call``; what stands for an image in a prompt is the engine's secret and asked for first."""
    headers = forwarded_headers(exchange.request.headers, exchange.id, has_body=True)
    body = call.body
    if call.media:
        answer = await exchange.upstream.send("GET", "/props", headers, None)
        try:
            body = call.with_media(marker_of(await answer.read()))
        finally:
            answer.close()
    body = exchange.context.parameters.applied(body, from_ollama=True)
    return await exchange.upstream.send("POST", call.path, headers, dump(body))


def marker_of(raw: bytes) -> str:
    """What ``/props`` says. Raises EngineError."""
    try:
        marker = json.loads(raw)["media_marker"]
    except (ValueError, KeyError, TypeError):
        marker = None
    if not isinstance(marker, str) or not marker:
        raise EngineError("llama-server does not say how its prompts take images", "use /api/chat")
    return marker


async def _whole(opening: Opening, translator: Translator) -> web.StreamResponse:
    """The engine's stream as one object, for a client that does not want a stream."""
    answer = await opening
    try:
        if answer.status != 200 or not answer.is_event_stream:
            raise _no_stream(answer, await answer.read())
        translator.held_ns = answer.held_ns
        records: list[Record] = []
        while data := await answer.chunk():
            records += translator.feed(data)
        return json_reply(gathered([*records, *translator.end()]))
    finally:
        answer.close()


async def _load(
    exchange: Exchange, ticket: Ticket, translation: request.Translation, translator: Translator
) -> web.StreamResponse:
    """A request without a prompt: be ready, or, with ``keep_alive: 0``, make room."""
    context = exchange.context
    with ticket.cuttable():
        if translation.unloads:
            exchange.admission.keep_alive.expire()
            return json_reply(translator.loaded("unload"))
        exchange.admission.keep_alive.renew()
        await context.backend.ready(context.limits.hold_timeout_s)
    return json_reply(translator.loaded("load"))


class NdjsonForm:
    """Ollama's stream: one object a line, never an empty one."""

    content_type = "application/x-ndjson"

    def __init__(self, translator: Translator) -> None:
        self._translator = translator

    def keep_alive(self) -> bytes:
        """A chunk without content; some readers fail on a blank line."""
        return _line(self._translator.empty())

    def opened(self, held_ns: int) -> None:
        """Held is what Ollama calls loading."""
        self._translator.held_ns = held_ns

    def feed(self, data: bytes) -> bytes:
        """The lines that ``data`` completes."""
        return b"".join(map(_line, self._translator.feed(data)))

    def end(self) -> bytes:
        """The last lines."""
        return b"".join(map(_line, self._translator.end()))

    def failure(self, error: MoeProxyError) -> bytes:
        """A line that says what went wrong."""
        return _line(error_value(Family.OLLAMA, error))

    def whole(self, answer: Answer, body: bytes) -> web.StreamResponse:
        """Always an error: a stream was asked for."""
        raise _no_stream(answer, body)


def _line(record: Mapping[str, object]) -> bytes:
    return dump(record) + b"\n"


def _no_stream(answer: Answer, body: bytes) -> MoeProxyError:
    if answer.status == 200:
        return EngineError("llama-server did not answer with a stream")
    return refusal(answer.status, body)


def _facts(context: ProxyContext) -> request.ModelFacts:
    card = context.model
    return request.ModelFacts(models.upstream_name(card), card.context_length, frozenset(card.capabilities))
