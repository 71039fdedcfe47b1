"""Owns the application: which route is answered by whom, and in which order a request is judged.

Head first (host, origin, target, key), then the route, then the handler, which asks for a place in the queue
before it reads the body. Every error leaves in the shape of its family.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from urllib.parse import unquote

from aiohttp import web

from moe_proxy.errors import (
    ForbiddenError,
    MoeProxyError,
    NotFoundError,
    RequestError,
    WrongMethodError,
)
from moe_proxy.proxy import dashboard, labels, passthrough, status
from moe_proxy.proxy.admission import Admission
from moe_proxy.proxy.context import ProxyContext
from moe_proxy.proxy.exchange import Exchange
from moe_proxy.proxy.front_page import front_page
from moe_proxy.proxy.keep_alive import KeepAlive
from moe_proxy.proxy.ollama import embeddings
from moe_proxy.proxy.ollama import routes as ollama
from moe_proxy.proxy.replies import error_reply
from moe_proxy.proxy.security import Head, check_head, check_key, normal_path
from moe_proxy.proxy.upstream import Upstream
from moe_proxy.proxy.watching import Watching

logger = logging.getLogger(__name__)

Endpoint = Callable[[Exchange], Awaitable[web.StreamResponse]]

ADMISSION = web.AppKey("admission", Admission)
_WATCHING = web.AppKey("watching", Watching)
_UPSTREAM = web.AppKey("upstream", Upstream)

# Beyond this, the follow-ups of the last requests are given up.
_SETTLE_S = 5.0
_CLIENT_GONE = 499
_PREFLIGHT_AGE_S = 600

# Everything there is. What is not here is not forwarded, so nothing that llama-server may learn to do, and no
# control route of the pager, is open by accident.
ROUTES: Mapping[str, Mapping[str, Endpoint]] = {
    "/": {"GET": front_page},
    "/health": {"GET": status.health},
    "/livez": {"GET": status.livez},
    "/stats": {"GET": status.stats},
    "/stats/label": {"POST": labels.label},
    "/metrics": {"GET": status.prometheus},
    "/dashboard": {"GET": dashboard.page},
    "/dashboard/events": {"GET": dashboard.events},
    "/openapi.json": {"GET": status.described},
    "/v1/chat/completions": {"POST": passthrough.generate},
    "/v1/completions": {"POST": passthrough.generate},
    "/v1/responses": {"POST": passthrough.generate},
    "/v1/messages": {"POST": passthrough.generate},
    "/v1/messages/count_tokens": {"POST": passthrough.forward},
    "/v1/embeddings": {"POST": passthrough.forward},
    "/v1/rerank": {"POST": passthrough.forward},
    "/v1/models": {"GET": status.openai_models},
    "/completion": {"POST": passthrough.generate},
    "/infill": {"POST": passthrough.generate},
    "/tokenize": {"POST": passthrough.forward},
    "/detokenize": {"POST": passthrough.forward},
    "/apply-template": {"POST": passthrough.forward},
    "/props": {"GET": passthrough.read},
    "/slots": {"GET": passthrough.read},
    "/ui": {"GET": passthrough.page},
    "/api/version": {"GET": ollama.version},
    "/api/tags": {"GET": ollama.tags},
    "/api/ps": {"GET": ollama.ps},
    "/api/show": {"POST": ollama.show},
    "/api/chat": {"POST": ollama.chat},
    "/api/generate": {"POST": ollama.generate},
    "/api/embed": {"POST": embeddings.embed},
    "/api/embeddings": {"POST": embeddings.embeddings},
    "/api/pull": {"POST": ollama.pull},
    "/api/push": {"POST": ollama.refused},
    "/api/create": {"POST": ollama.refused},
    "/api/copy": {"POST": ollama.refused},
    "/api/delete": {"DELETE": ollama.refused},
}
# One more segment after these names something.
NAMED_ROUTES: Mapping[str, Mapping[str, Endpoint]] = {
    "/v1/models": {"GET": status.openai_model},
    "/dashboard": {"GET": dashboard.file},
    "/ui": {"GET": passthrough.page},
    "/api/blobs": {"POST": ollama.refused, "GET": ollama.refused},
}

# Closed unless the operator opens them, and only as far as they are named here.
OPENABLE: Mapping[str, Mapping[str, Endpoint]] = {
    "/props": {"POST": passthrough.write},
    "/lora-adapters": {"GET": passthrough.read, "POST": passthrough.write},
}
NAMED_OPENABLE: Mapping[str, Mapping[str, Endpoint]] = {"/slots": {"POST": passthrough.write}}


class Live:
    """The context and routes of requests that come now; those under way keep what they came to."""

    def __init__(self, context: ProxyContext) -> None:
        self.change(context)

    def change(self, context: ProxyContext) -> None:
        """From now on, this one."""
        self.context = context
        self.routes = _with_open(ROUTES, OPENABLE, context.open_routes)
        self.named_routes = _with_open(NAMED_ROUTES, NAMED_OPENABLE, context.open_routes)

    def path_of(self, path: str) -> str:
        """``path``; for one that llama-server's page asks for below its own, the path of the route itself."""
        route = path.removeprefix("/ui")
        return route if path.startswith("/ui/") and route in self.routes else path


LIVE = web.AppKey("live", Live)


def _with_open(
    routes: Mapping[str, Mapping[str, Endpoint]],
    openable: Mapping[str, Mapping[str, Endpoint]],
    opened: frozenset[str],
) -> Mapping[str, Mapping[str, Endpoint]]:
    more = {path: {**routes.get(path, {}), **methods} for path, methods in openable.items() if path in opened}
    return {**routes, **more}


def make_app(context: ProxyContext) -> web.Application:
    """The application. Its client of the engine is made when it starts and closed after the last request."""
    app = web.Application(client_max_size=context.limits.max_body_bytes)
    app[LIVE] = Live(context)
    keep_alive = KeepAlive(context.keep_alive, context.unload)
    app[ADMISSION] = admission = Admission(context.limits, context.metrics, keep_alive)
    app[_WATCHING] = watching = Watching(
        context.stats,
        context.placement,
        monotonic_s=context.clocks.monotonic_s,
        wall_ns=context.clocks.wall_ns,
        beside=lambda: admission.beside("dashboard"),
    )

    async def end_views(_: web.Application) -> None:
        await watching.close()

    app.on_shutdown.append(end_views)
    # Routing is ours, because it has to see the same normal path that is judged and forwarded.
    app.router.add_route("*", "/{path:(?s:.*)}", _dispatch)
    app.cleanup_ctx.append(_connected)
    return app


def change(app: web.Application, context: ProxyContext) -> None:
    """Answer the requests that come from now on by ``context``.

    It differs in policy alone: the backend, the clocks, and what counts and observes are the same ones.
    """
    app[LIVE].change(context)
    app[ADMISSION].limits = context.limits


async def _connected(app: web.Application) -> AsyncIterator[None]:
    context = app[LIVE].context
    app[_UPSTREAM] = Upstream(context.backend, context.limits, context.clocks)
    yield
    app[ADMISSION].keep_alive.close()
    await app[ADMISSION].settle(_SETTLE_S)
    await app[_UPSTREAM].close()


async def _dispatch(request: web.Request) -> web.StreamResponse:
    app = request.app
    path = app[LIVE].path_of(normal_path(request.raw_path))
    exchange = Exchange(request, app[LIVE].context, app[ADMISSION], app[_UPSTREAM], app[_WATCHING], path)
    clocks, metrics = exchange.context.clocks, exchange.context.metrics
    code = _CLIENT_GONE
    try:
        response = await _answer(exchange)
        if not response.prepared:
            exchange.stamp(response)
        code = response.status
        return response
    finally:
        duration_s = clocks.monotonic_s() - exchange.started_s
        metrics.answered(exchange.route, code, duration_s)
        if exchange.generates and code == 200:
            metrics.generated(duration_s)
        if exchange.context.access_log is not None:
            try:
                exchange.context.access_log(exchange.record(code, duration_s))
            except (OSError, ValueError):
                # A full disk, a reader that went away: the answer does not depend on them.
                metrics.step_failed("access log")


async def _answer(exchange: Exchange) -> web.StreamResponse:
    try:
        request = exchange.request
        head = Head(
            request.raw_path,
            tuple(request.headers.getall("Host", ())),
            request.headers.get("Origin"),
            request.headers.get("Sec-Fetch-Site"),
        )
        check_head(head, exchange.context.security)
        if request.method != "OPTIONS":
            # A browser asks its question before a request without the key that the request will have.
            check_key(request.headers, exchange.path, exchange.context.security)
        methods = _methods(exchange, exchange.request.app[LIVE])
        if methods is None:
            raise NotFoundError(f"there is no route {exchange.path}")
        if request.method == "OPTIONS":
            return _options(request, methods)
        endpoint = methods.get("GET" if request.method == "HEAD" else request.method)
        if endpoint is None:
            error = WrongMethodError(f"{exchange.path} does not take {request.method}")
            reply = error_reply(exchange.family, error)
            reply.headers["Allow"] = _allowed(methods)
            return reply
        return await endpoint(exchange)
    except MoeProxyError as error:
        if exchange.committed:
            raise
        if isinstance(error, ForbiddenError):
            # Whoever set this up sees a tool that does not work, and rarely what it was answered.
            exchange.admission.notices.say(f"a request was refused: {error}; see docs/config.md")
        return error_reply(exchange.family, error)
    except (ConnectionError, asyncio.CancelledError):
        raise
    except RecursionError:
        if exchange.committed:
            raise
        # The parser's limit need not be that of those who walk through what it has parsed.
        return error_reply(exchange.family, RequestError("the body is nested too deeply"))
    except Exception:
        logger.exception("request %s failed", exchange.id)
        if exchange.committed:
            # The client is to notice: its stream breaks off.
            raise
        return error_reply(
            exchange.family, MoeProxyError("internal error", f"request {exchange.id} in the log")
        )


def _methods(exchange: Exchange, live: Live) -> Mapping[str, Endpoint] | None:
    """The endpoints of the path by method, noting the route's pattern and name; None: no such route."""
    found = live.routes.get(exchange.path)
    if found is not None:
        exchange.route = exchange.path
        return found
    for prefix, methods in live.named_routes.items():
        if exchange.path.startswith(prefix + "/"):
            exchange.route = prefix + "/{name}"
            exchange.name = unquote(exchange.path.removeprefix(prefix + "/"))
            return methods
    return None


def _options(request: web.Request, methods: Mapping[str, Endpoint]) -> web.Response:
    """OPTIONS, a browser's question before a request among them; the origin was judged already."""
    allowed = _allowed(methods)
    headers = {"Allow": allowed}
    if "Origin" in request.headers and "Access-Control-Request-Method" in request.headers:
        headers["Access-Control-Allow-Methods"] = allowed
        headers["Access-Control-Max-Age"] = str(_PREFLIGHT_AGE_S)
        asked = request.headers.get("Access-Control-Request-Headers")
        if asked:
            headers["Access-Control-Allow-Headers"] = asked
        if request.headers.get("Access-Control-Request-Private-Network") == "true":
            headers["Access-Control-Allow-Private-Network"] = "true"
    return web.Response(status=204, headers=headers)


def _allowed(methods: Mapping[str, Endpoint]) -> str:
    head = ("HEAD",) if "GET" in methods else ()
    return ", ".join((*methods, *head, "OPTIONS"))
