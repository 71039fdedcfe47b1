"""Owns the routes whose bytes go through as they are: headers are filtered, the body is not touched."""

from __future__ import annotations

import re
from collections.abc import Mapping

from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from moe_proxy.errors import EngineGoneError, MoeProxyError, NotFoundError
from moe_proxy.proxy.admission import Ticket
from moe_proxy.proxy.exchange import Exchange
from moe_proxy.proxy.ollama import models
from moe_proxy.proxy.relay import relay
from moe_proxy.proxy.replies import Family, dump, error_value
from moe_proxy.proxy.security import check_media
from moe_proxy.proxy.upstream import Answer

_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
     "te", "trailer", "transfer-encoding", "upgrade"}
)  # fmt: skip
# Ours to set; the client's secrets, which the engine has no use for; and X-Conversation-Id, with which
# llama-server goes on generating after its client has gone.
_NOT_FORWARDED = _HOP_BY_HOP | frozenset(
    {"host", "content-length", "content-encoding", "content-type", "expect", "accept-encoding", "origin",
     "authorization", "x-api-key", "cookie", "x-conversation-id", "x-moe-request", "x-moe-domain"}
)  # fmt: skip
_NOT_RETURNED = _HOP_BY_HOP | frozenset({"content-length", "server", "date"})

# How a complete stream ends, per route: a line of its own, which no text inside a JSON string can look like.
_TERMINALS: Mapping[str, tuple[bytes, ...]] = {
    "/v1/chat/completions": (b"\ndata: [DONE]",),
    "/v1/completions": (b"\ndata: [DONE]",),
    "/v1/messages": (b"\nevent: message_stop",),
    "/v1/responses": (b"\nevent: response.completed", b"\nevent: response.incomplete"),
    "/completion": (b'"stop":true', b'"stop": true'),
    "/infill": (b'"stop":true', b'"stop": true'),
}
# The engine has said itself what went wrong; nothing is to be added.
_ERRORS = (b'\ndata: {"error"', b"\nevent: error", b"\nerror:")
_LONGEST_MARK = 40

_PAGE = "/ui"
_FILE = re.compile(r"/[^/]*\.(?:css|gif|html|ico|jpg|js|json|map|png|svg|txt|wasm|webmanifest|webp|woff2?)$")


def forwarded_headers(headers: CIMultiDictProxy[str], request_id: str, has_body: bool) -> CIMultiDict[str]:
    """The client's headers as the engine gets them."""
    result = _without(headers, _NOT_FORWARDED)
    result["Host"] = "localhost"
    result["Accept-Encoding"] = "identity"
    result["X-Moe-Request"] = request_id
    if has_body:
        # Whatever the client called it: llama-server cuts forms off at 1 MiB.
        result["Content-Type"] = "application/json"
    return result


def returned_headers(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """The engine's headers as the client gets them; who may read an answer is for us to say."""
    result = _without(headers, _NOT_RETURNED)
    for name in [name for name in result if name.lower().startswith("access-control-")]:
        result.popall(name, None)
    return result


async def generate(exchange: Exchange) -> web.StreamResponse:
    """POST of a route that generates text: classified, observed, streamed."""
    with exchange.admission.admitted() as ticket:
        raw, value = await _judged(exchange)
        edited = exchange.context.parameters.applied(value)
        if edited is not value:
            raw = await exchange.aside(len(raw), lambda: dump(edited))
        with exchange.observed(await exchange.classified(value)):
            return await _relayed(exchange, ticket, raw, patient=value.get("stream") is True)


async def forward(exchange: Exchange) -> web.StreamResponse:
    """Any other POST of a JSON object."""
    with exchange.admission.admitted() as ticket:
        raw, _ = await _judged(exchange)
        return await _relayed(exchange, ticket, raw)


async def write(exchange: Exchange) -> web.StreamResponse:
    """POST of what changes the engine's state: whatever the body is, it is the engine's affair."""
    with exchange.admission.admitted() as ticket:
        return await _relayed(exchange, ticket, await exchange.body())


async def read(exchange: Exchange) -> web.StreamResponse:
    """GET of what the engine says of itself."""
    with exchange.admission.admitted() as ticket:
        return await _relayed(exchange, ticket, None)


async def _judged(exchange: Exchange) -> tuple[bytes, Mapping[str, object]]:
    """The body, as it came and as an object. Raises RequestError for media and models that are refused."""
    raw, value = await exchange.json_object()
    check_media(value)
    models.check_openai(exchange.context, value.get("model"))
    return raw, value


async def _relayed(
    exchange: Exchange, ticket: Ticket, raw: bytes | None, *, patient: bool = False
) -> web.StreamResponse:
    """The engine's answer to a POST of ``raw``, or to a GET."""
    has_body = raw is not None
    headers = forwarded_headers(exchange.request.headers, exchange.id, has_body=has_body)
    opening = exchange.upstream.send("POST" if has_body else "GET", exchange.target, headers, raw)
    form = SseForm(exchange.path, exchange.family)
    return await relay(exchange, ticket, opening, form, patient=patient)


async def page(exchange: Exchange) -> web.StreamResponse:
    """GET of llama-server's own page and of the files that belong to it, where they were built in.

    Its files have an extension, which none of llama-server's routes has: none of them is reached this way.
    """
    if exchange.path == _PAGE and not exchange.request.path.endswith("/"):
        # The page names its files and routes relative to where it lies.
        return web.Response(status=308, headers={"Location": f"{_PAGE}/"})
    target = exchange.path.removeprefix(_PAGE) or "/"
    absent = NotFoundError(f"there is no {exchange.path}", "this llama-server was built without its page")
    if target != "/" and not _FILE.search(target):
        raise absent
    with exchange.admission.admitted():
        headers = forwarded_headers(exchange.request.headers, exchange.id, has_body=False)
        # These are stored compressed, and llama-server refuses whoever does not take them so.
        headers["Accept-Encoding"] = exchange.request.headers.get("Accept-Encoding", "identity")
        answer = await exchange.upstream.send("GET", target, headers, None)
        try:
            if answer.status == 404:
                raise absent
            body = await answer.read()
        finally:
            answer.close()
    return web.Response(status=answer.status, body=body, headers=returned_headers(answer.headers))


class SseForm:
    """Bytes as they are, while watching whether the stream comes to its proper end."""

    content_type = "text/event-stream"

    def __init__(self, path: str, family: Family) -> None:
        self._path = path
        self._family = family
        self._marks = (*_TERMINALS.get(path, ()), *_ERRORS)
        self._judged = path in _TERMINALS
        # A line end stands before the first line, so that its mark is found like any other.
        self._tail = b"\n"
        self._terminated = False

    def keep_alive(self) -> bytes:
        """An SSE comment."""
        return b": waiting for the model\n\n"

    def opened(self, held_ns: int) -> None:
        """Bytes do not say how long they were held."""

    def feed(self, data: bytes) -> bytes:
        """The same bytes."""
        window = self._tail + data
        self._terminated = self._terminated or any(mark in window for mark in self._marks)
        self._tail = window[-_LONGEST_MARK:]
        return data

    def end(self) -> bytes:
        """Nothing; raises EngineGoneError when neither the end nor an error was among the bytes."""
        if self._judged and not self._terminated:
            raise EngineGoneError("llama-server ended the stream before the answer was complete", "try again")
        return b""

    def failure(self, error: MoeProxyError) -> bytes:
        """An error event, set apart from an event that was cut in two."""
        apart = b"" if self._tail in (b"\n",) or self._tail.endswith((b"\n\n", b"\r\n\r\n")) else b"\n\n"
        if self._path == "/v1/responses":
            value: dict[str, object] = {
                "type": "error", "code": error.openai_type, "message": str(error), "param": None,
            }  # fmt: skip
        else:
            value = error_value(self._family, error)
        named = b"event: error\n" if "type" in value else b""
        return apart + named + b"data: " + dump(value) + b"\n\n"

    def whole(self, answer: Answer, body: bytes) -> web.StreamResponse:
        """The same status, headers and bytes."""
        return web.Response(status=answer.status, body=body, headers=returned_headers(answer.headers))


def _without(headers: CIMultiDictProxy[str], names: frozenset[str]) -> CIMultiDict[str]:
    """A copy that keeps repeated headers, without ``names`` and without those that Connection lists."""
    listed = {name.strip().lower() for value in headers.getall("Connection", ()) for name in value.split(",")}
    result: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        if name.lower() not in names and name.lower() not in listed:
            result.add(name, value)
    return result
