#!/usr/bin/env python3
"""A stand-in for llama-server that takes its argv, answers in its shapes and misbehaves on demand.

Owns nothing of the product: tests start it as a child process. Options of llama-server that it does not know
are ignored. Switches (``fake_llama_state.Switches``) come from argv, then from ``FAKE_LLAMA_SWITCHES`` (one
shell-quoted string), then, while it runs, from ``POST /fake/switches`` with a JSON object of field names.

What it saw can be read back: ``GET /fake/requests`` (every request with headers, body, sha256, ``finished``,
``disconnected``), ``GET /fake/priors`` and ``GET /fake/budgets`` (what the pager's control API was sent).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import typing
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web
from fake_llama_answers import events_of, generation_of, route, whole_of
from fake_llama_experts import (
    experts,
    experts_budget,
    experts_prior,
    experts_residency,
    experts_stats,
    experts_usage,
)
from fake_llama_info import (
    apply_template,
    detokenize,
    embeddings,
    health,
    metrics,
    models,
    props,
    slots,
    tokenize,
    unknown,
)
from fake_llama_state import EXPERTS, FAKE, LAYERS, Fake, Seen, Switches, error


def die() -> typing.NoReturn:
    """End as kill -9 ends it: nothing is flushed, nothing is closed politely."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


async def sse(switches: Switches, events: list[dict[str, object]], done: bool) -> AsyncIterator[bytes]:
    """The bytes of a stream, one event at a time, with whatever was switched on."""
    for index, event in enumerate(events):
        if switches.die_after_chunks and index >= switches.die_after_chunks:
            die()
        if switches.hang_after_chunks and index >= switches.hang_after_chunks:
            await asyncio.Event().wait()
        if switches.slow_chunks:
            await asyncio.sleep(switches.slow_chunks)
        if switches.stream_error and index == len(events) // 2:
            body = {"error": {"code": 500, "message": "the fake failed", "type": "server_error"}}
            yield b"data: " + json.dumps(body).encode() + b"\n\n"
            return
        if switches.ping:
            yield b":\n\n"
        yield b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"
    if done:
        yield b"data: [DONE]\n\n"


async def generate(request: web.Request, family: str) -> web.StreamResponse:
    """Every route that generates."""
    fake, switches = request.app[FAKE], request.app[FAKE].switches
    if switches.die_before_headers:
        die()
    if switches.hang:
        await asyncio.Event().wait()
    if switches.garbage:
        return web.Response(
            body=b"\x00\xff<garbage>{not json\n\ndata: {oops\n\n", content_type="application/json"
        )
    if switches.error_status:
        return error(switches.error_status, "the fake refuses", "server_error")
    try:
        body = json.loads(await request.read())
    except ValueError as problem:
        return error(500, f"parse error: {problem}", "server_error")
    if family == "chat" and not isinstance(body.get("messages"), list):
        return error(400, "'messages' is required", "invalid_request_error")
    made = generation_of(fake, body)
    request_id = request.headers.get("X-Moe-Request", "")
    route(fake, made, request_id)
    if not body.get("stream"):
        if switches.slow_chunks:
            await asyncio.sleep(switches.slow_chunks * len(made.pieces))
        return web.json_response(whole_of(fake, made, family))
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Server": "llama.cpp"})
    await response.prepare(request)
    events, done = events_of(fake, made, family)
    sent = 0
    async for piece in sse(switches, events, done):
        if switches.truncate_after_chunks and sent >= switches.truncate_after_chunks:
            if request.transport is not None:
                request.transport.abort()
            return response
        await response.write(piece)
        sent += 1
    await response.write_eof()
    return response


async def chat(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    return await generate(request, "chat")


async def completion_text(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    return await generate(request, "text")


async def completion_native(request: web.Request) -> web.StreamResponse:
    """POST /completion."""
    return await generate(request, "native")


async def fake_requests(request: web.Request) -> web.Response:
    """GET /fake/requests."""
    return web.json_response([dataclasses.asdict(seen) for seen in request.app[FAKE].requests])


async def fake_priors(request: web.Request) -> web.Response:
    """GET /fake/priors."""
    return web.json_response(request.app[FAKE].priors)


async def fake_budgets(request: web.Request) -> web.Response:
    """GET /fake/budgets."""
    return web.json_response(request.app[FAKE].budgets)


async def fake_switches(request: web.Request) -> web.Response:
    """POST /fake/switches: change behaviour while running."""
    fake = request.app[FAKE]
    fake.switches = dataclasses.replace(fake.switches, **await request.json())
    return web.json_response(dataclasses.asdict(fake.switches))


@web.middleware
async def record(
    request: web.Request, handler: typing.Callable[[web.Request], typing.Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Note every request, hold back all routes while loading, and apply the control switches."""
    fake = request.app[FAKE]
    if request.path.startswith("/fake/"):
        return await handler(request)
    if not fake.ready:
        return error(503, "Loading model", "unavailable_error")
    if request.path.startswith("/experts"):
        if fake.switches.control_delay:
            await asyncio.sleep(fake.switches.control_delay)
        if fake.switches.control_fails:
            return error(500, "the fake's pager failed", "server_error")
        if not fake.switches.pager:
            return error(501, "the pager is off: MOE_PAGER is not set", "not_supported_error")
    raw = await request.read()
    try:
        body = json.loads(raw) if raw else None
    except ValueError:
        body = raw.decode("utf-8", "replace")
    seen = Seen(
        request.method,
        request.path,
        request.query_string,
        dict(request.headers),
        body,
        hashlib.sha256(raw).hexdigest(),
    )
    if request.path != "/health":
        fake.requests.append(seen)
    try:
        response = await handler(request)
    except (asyncio.CancelledError, ConnectionResetError):
        seen.disconnected = True
        raise
    seen.finished = True
    return response


def make_app(fake: Fake) -> web.Application:
    """All routes."""
    app = web.Application(middlewares=[record], client_max_size=100 << 20)
    app[FAKE] = fake
    for path in ("/health", "/v1/health"):
        app.router.add_get(path, health)
    for path in ("/v1/chat/completions", "/chat/completions"):
        app.router.add_post(path, chat)
    app.router.add_post("/v1/completions", completion_text)
    for path in ("/completion", "/completions", "/infill"):
        app.router.add_post(path, completion_native)
    for path in ("/v1/embeddings", "/embeddings"):
        app.router.add_post(path, embeddings)
    app.router.add_post("/tokenize", tokenize)
    app.router.add_post("/detokenize", detokenize)
    app.router.add_post("/apply-template", apply_template)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/props", props)
    app.router.add_get("/slots", slots)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/experts", experts)
    app.router.add_get("/experts/stats", experts_stats)
    app.router.add_get("/experts/residency", experts_residency)
    app.router.add_get("/experts/usage", experts_usage)
    app.router.add_post("/experts/prior", experts_prior)
    app.router.add_post("/experts/budget", experts_budget)
    app.router.add_get("/fake/requests", fake_requests)
    app.router.add_get("/fake/priors", fake_priors)
    app.router.add_get("/fake/budgets", fake_budgets)
    app.router.add_post("/fake/switches", fake_switches)
    app.router.add_route("*", "/{path:.*}", unknown)
    return app


def parse(argv: list[str]) -> Fake:
    """Read llama-server's argv and the switches; anything unknown is somebody else's option and ignored."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--host", required=True)
    parser.add_argument("--model", "-m", default="")
    parser.add_argument("--alias", "-a", default="planted-moe")
    parser.add_argument("--ctx-size", "-c", type=int, default=4096)
    parser.add_argument("--parallel", "-np", type=int, default=1)
    for option in dataclasses.fields(Switches):
        name = "--" + option.name.replace("_", "-")
        if isinstance(option.default, bool):
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=option.default)
        else:
            parser.add_argument(name, type=type(option.default), default=option.default)
    known, _ = parser.parse_known_args(argv + shlex.split(os.environ.get("FAKE_LLAMA_SWITCHES", "")))
    names = {option.name for option in dataclasses.fields(Switches)}
    switches = Switches(**{name: value for name, value in vars(known).items() if name in names})
    fake = Fake(known.alias.split(",")[0], known.model, max(1, known.parallel), known.ctx_size, switches)
    fake.usage[""], fake.usage_tokens[""] = {layer: [0] * EXPERTS for layer in range(LAYERS)}, 0
    return fake


def misbehave_at_start(switches: Switches) -> None:
    """Everything that happens before the socket exists."""
    if switches.starts_file:
        with Path(switches.starts_file).open("a") as starts:
            starts.write(f"{os.getpid()}\n")
        count = len(Path(switches.starts_file).read_text().splitlines())
        if switches.fail_from_start and count >= switches.fail_from_start:
            print(f"error: start {count} fails on demand", flush=True)
            sys.exit(3)
    for number in range(switches.log_lines):
        text = f"line {number} "
        sys.stdout.write(text.ljust(switches.log_line_bytes - 1, "x") + "\n")
    sys.stdout.flush()
    if switches.exit_at_start >= 0:
        print("error: invalid argument: the fake exits on demand", file=sys.stderr, flush=True)
        sys.exit(switches.exit_at_start)
    if switches.grandchild:
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", code])
        print(f"grandchild {child.pid}", flush=True)


async def serve(fake: Fake, host: str) -> None:
    """Listen, become ready and wait for SIGTERM, as far as the switches allow."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    if fake.switches.ignore_sigterm:
        loop.add_signal_handler(signal.SIGTERM, lambda: print("SIGTERM ignored", flush=True))
    else:
        loop.add_signal_handler(signal.SIGTERM, stopping.set)
    if fake.switches.never_listen:
        await stopping.wait()
        return
    runner = web.AppRunner(make_app(fake), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    print(f"listening on {host}, pid {os.getpid()}", flush=True)
    await web.UnixSite(runner, host).start()
    if not fake.switches.never_ready:
        await asyncio.sleep(fake.switches.ready_after)
        fake.ready = True
        print("main: model loaded", flush=True)
    if fake.switches.crash_after:
        loop.call_later(fake.switches.crash_after, die)
    await stopping.wait()
    await runner.cleanup()


def main(argv: list[str]) -> None:
    """Run as llama-server is run."""
    fake = parse(argv)
    misbehave_at_start(fake.switches)
    host = argv[argv.index("--host") + 1]
    asyncio.run(serve(fake, host))


if __name__ == "__main__":
    main(sys.argv[1:])
