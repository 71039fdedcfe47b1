"""Owns what stands at ``/``: a word for Ollama's clients, a page for browsers; it waits for no engine."""

from __future__ import annotations

from html import escape

from aiohttp import web

from moe_proxy.proxy.exchange import Exchange
from moe_proxy.proxy.status import state_and_reason

# What Ollama's clients look for.
_RUNNING = "Ollama is running"
# Nothing from anywhere else, no script, in nobody's frame.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'"
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>moe-proxy</title>
<style>
body {{ font: 1rem/1.5 system-ui, sans-serif; max-width: 40rem; margin: 3rem auto; padding: 0 1rem }}
:root {{ color-scheme: light dark }}
</style>
<h1>moe-proxy</h1>
<p>Ollama is running, and so is an OpenAI API: point your tool at this address.</p>
<p>{state}</p>
<ul>
<li><a href="/dashboard">/dashboard</a>: what happens now</li>
<li><a href="/stats">/stats</a>: what really happened</li>
<li><a href="/metrics">/metrics</a>: the same for Prometheus</li>
<li><a href="/v1/models">/v1/models</a>, <a href="/api/tags">/api/tags</a>: the served model</li>
<li><a href="/openapi.json">/openapi.json</a>: all routes</li>
</ul>
</html>
"""


async def front_page(exchange: Exchange) -> web.StreamResponse:
    """GET /."""
    if "text/html" not in exchange.request.headers.get("Accept", ""):
        return web.Response(text=_RUNNING, headers={"Vary": "Accept"})
    state, reason = state_and_reason(exchange)
    context = exchange.context
    # Whoever has no key sees no more of the model than that there is one.
    subject = "The model" if context.security.key_digests else context.model.name
    line = f"{subject} is {state}." if not reason else f"{subject} is {state}: {reason}"
    headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff", "Vary": "Accept"}
    return web.Response(text=_PAGE.format(state=escape(line)), content_type="text/html", headers=headers)
