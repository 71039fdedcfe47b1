"""Owns ``/dashboard``: a page that lies in the package, and the events that it is fed with.

The page holds nothing of this proxy's, so that it can be opened without a key; the events need one like any
other route. A browser cannot send a key with an EventSource, so the page reads them as a stream of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from importlib.resources import files

from aiohttp import web

from moe_proxy.errors import NotFoundError
from moe_proxy.proxy.exchange import Exchange
from moe_proxy.proxy.relay import deliver
from moe_proxy.proxy.replies import dump
from moe_proxy.proxy.watching import Update

_FILES: Mapping[str, str] = {
    "dashboard.html": "text/html",
    "dashboard.css": "text/css",
    "dashboard.js": "text/javascript",
    "charts.js": "text/javascript",
}
# Nothing from anywhere else, nothing inline, in nobody's frame.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
    " frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def page(exchange: Exchange) -> web.StreamResponse:
    """GET /dashboard."""
    return _file("dashboard.html")


async def file(exchange: Exchange) -> web.StreamResponse:
    """GET /dashboard/{name}: what the page is made of."""
    if exchange.name not in _FILES:
        raise NotFoundError(f"there is no {exchange.path}")
    return _file(exchange.name)


async def events(exchange: Exchange) -> web.StreamResponse:
    """GET /dashboard/events: server-sent events, each with what is new since the one before."""
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", "Content-Type": "text/event-stream"}
    response = web.StreamResponse(headers=headers)
    if exchange.request.method == "HEAD":
        return response
    with exchange.watching.watched() as watcher:
        while (update := await watcher.update()) is not None:
            await deliver(exchange, response, b"data: " + dump(_json(update)) + b"\n\n")
    if response.prepared:
        await response.write_eof()
    return response


def _json(update: Update) -> dict[str, object]:
    return {
        "points": [
            {"time_ms": point.time_ms, "first": point.first, **asdict(point.rates)} for point in update.points
        ],
        "stats": update.stats,
        **({"placement": update.placement} if update.placed else {}),
    }


def _file(name: str) -> web.Response:
    return web.Response(body=_content(name), content_type=_FILES[name], charset="utf-8", headers=_HEADERS)


@cache
def _content(name: str) -> bytes:
    return (files(__package__) / "page" / name).read_bytes()
