"""Owns ``start``, ``stop``, ``status`` and ``logs``: the life of a proxy as seen from a shell."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import click
import psutil
from rich.console import Console

from moe_proxy.app import serve
from moe_proxy.cli.build import built_engine
from moe_proxy.cli.client import find_proxy, get_json, paths_of
from moe_proxy.config import Settings, load_settings
from moe_proxy.engine.launch import refuse_our_flags
from moe_proxy.engine.recipe import BuildRequest
from moe_proxy.errors import ConfigError, EngineStartError, NotRunningError
from moe_proxy.instance import InstancePaths, running_proxy
from moe_proxy.served import Served, examine

_POLL_S = 0.1

port_option = click.option("--port", type=click.IntRange(0, 65535), help="port of the proxy")


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_port_is_free(settings: Settings, paths: InstancePaths) -> None:
    """Raise ConfigError when the port is taken, before anything slow begins."""
    proxy = running_proxy(paths)
    if proxy is not None:
        raise ConfigError(
            f"a proxy runs on port {settings.port} already (pid {proxy.pid})",
            f"stop it with moe-proxy stop --port {settings.port}, or choose another --port",
        )
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {settings.host} port {settings.port}: {error.strerror}",
                "choose another --port, or see who uses it with: ss -ltnp",
            ) from error


def engine_for_start(settings: Settings, source: Path | None, console: Console) -> Path:
    """The llama-server to run: the one the settings name, or our own build, made now if need be."""
    if settings.engine is not None:
        if not os.access(settings.engine, os.X_OK):
            raise ConfigError(
                f"{settings.engine} is not an executable file", "name a llama-server with --engine, or none"
            )
        return settings.engine
    request = BuildRequest(cache_dir=settings.cache_dir, source=source, cuda=settings.gpu)
    return built_engine(request, console).server


@click.command(epilog="Example: moe-proxy start --model qwen3-30b-a3b-q4_k_m.gguf --ram-budget 12G -- -fa on")
@click.option(
    "--model", type=click.Path(path_type=Path), help="GGUF file; default: the small model that ships"
)
@click.option("--alias", help="name of the model towards clients; default: the file's stem")
@click.option("--host", help="address to listen on; default: 127.0.0.1 and ::1")
@click.option("--port", type=click.IntRange(0, 65535), help="port; default 11435, 0 takes a free one")
@click.option("--gpu/--cpu", default=None, help="use an NVIDIA GPU for everything but the experts")
@click.option("--pager/--no-pager", default=None, help="the expert pager; without it: stock llama.cpp")
@click.option("--ram-budget", metavar="SIZE", help="RAM for experts: 8G, 512M, or 30% of all experts")
@click.option("--router-map", type=click.Path(path_type=Path), help="router map of this model")
@click.option("--router-top-k", type=click.IntRange(min=1), help="of the map, each layer's N busiest experts")
@click.option("--learn/--no-learn", default=None, help="let the router map follow the traffic")
@click.option("--classifier", metavar="NAMES", help="keyword, tfidf, embedding: asked in the order given")
@click.option("--ctx-size", "context_length", type=click.IntRange(min=16), help="tokens of context")
@click.option("--slots", type=click.IntRange(1, 256), help="requests computed at once")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads")
@click.option(
    "--engine", type=click.Path(path_type=Path), help="a llama-server to use instead of building one"
)
@click.option(
    "--source", type=click.Path(path_type=Path), help="a llama.cpp tree to build instead of the pinned one"
)
@click.option("--detach", is_flag=True, help="return once the model is ready; the proxy goes on")
@click.argument("engine_args", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGS FOR LLAMA-SERVER]")
def start(source: Path | None, detach: bool, engine_args: tuple[str, ...], **flags: Any) -> None:
    """Serve a model on port 11435 for OpenAI and Ollama clients; build llama-server when needed."""
    if engine_args and not engine_args[0].startswith("-"):
        raise click.UsageError(
            f"unexpected argument {engine_args[0]!r}; arguments for llama-server follow --"
        )
    refuse_our_flags(engine_args)
    if flags["port"] == 0:
        flags["port"] = free_port()
    settings = load_settings(flags)
    console = Console(stderr=True)
    paths = paths_of(settings)
    check_port_is_free(settings, paths)
    served = examine(settings)
    paths.prepare()
    server = engine_for_start(settings, source, console)
    describe(served, console)
    if detach:
        start_detached(settings, server, engine_args, paths, console)
    else:
        asyncio.run(serve(served, server, paths, engine_args, lambda line: say(console, line)))


def say(console: Console, line: str) -> None:
    """Print one line as it is: a terminal may wrap it, a file must not."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def describe(served: Served, console: Console) -> None:
    """Say in a few lines what is going to run."""
    reason = served.plan.reason
    for line in (f"{reason[:1].upper()}{reason[1:]}.", *served.notes):
        say(console, line)


def start_detached(
    settings: Settings, server: Path, engine_args: tuple[str, ...], paths: InstancePaths, console: Console
) -> None:
    """Run the same start in a process of its own; return when it is ready. Raises EngineStartError."""
    told = settings.model_dump(exclude_none=True, mode="json") | {"engine": str(server)}
    environment = os.environ | {f"MOE_PROXY_{name.upper()}": str(value) for name, value in told.items()}
    argv = [sys.executable, "-m", "moe_proxy", "start", "--", *engine_args]
    with paths.proxy_log.open("wb") as log:
        process = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + settings.ready_timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            said = paths.proxy_log.read_text(encoding="utf-8", errors="replace").splitlines() or ["nothing"]
            raise EngineStartError(
                f"the proxy ended with code {process.returncode}: {said[-1]}",
                f"see {paths.proxy_log}",
            )
        proxy = running_proxy(paths)
        if proxy is not None and proxy.pid == process.pid:
            try:
                ready = get_json(proxy, "/health").get("status") == "ok"
            except NotRunningError:
                ready = False
            if ready:
                say(console, f"Ready on {proxy.url} (pid {proxy.pid}).")
                return
        time.sleep(_POLL_S)
    process.terminate()
    raise EngineStartError(
        f"not ready within {settings.ready_timeout_s:g} s", f"see {paths.engine_log}, raise ready_timeout_s"
    )


@click.command(epilog="Example: moe-proxy stop")
@port_option
@click.option("--now", is_flag=True, help="do not wait for running streams")
def stop(port: int | None, now: bool) -> None:
    """Stop the proxy: running streams finish first."""
    settings = load_settings({"port": port})
    proxy = find_proxy(settings)
    try:
        process = psutil.Process(proxy.pid)
        process.send_signal(signal.SIGTERM)
        if now:
            # The second SIGTERM means at once; it must not melt into the first.
            time.sleep(_POLL_S)
            process.send_signal(signal.SIGTERM)
        process.wait(settings.drain_s + 30)
    except psutil.NoSuchProcess:
        pass
    except psutil.TimeoutExpired as error:
        raise EngineStartError(
            f"the proxy (pid {proxy.pid}) has not ended", f"end it with: kill -9 {proxy.pid}"
        ) from error
    click.echo(f"Stopped the proxy on port {settings.port}.")


@click.command(epilog="Example: moe-proxy status --json")
@port_option
@click.option("--json", "as_json", is_flag=True, help="print the state as JSON")
def status(port: int | None, as_json: bool) -> None:
    """Say whether the proxy runs and whether its model is ready; exit code 1 when not."""
    settings = load_settings({"port": port})
    proxy = find_proxy(settings)
    health = get_json(proxy, "/health")
    ready = health.get("status") == "ok"
    if as_json:
        body = {"url": proxy.url, "pid": proxy.pid, "model": proxy.model, "ready": ready, **health}
        click.echo(json.dumps(body))
    else:
        reason = "" if ready else f": {health.get('reason') or health.get('state')}"
        click.echo(f"{proxy.url} {'ready' if ready else 'not ready'}{reason}, {proxy.model}, pid {proxy.pid}")
    if not ready:
        sys.exit(1)


@click.command(epilog="Example: moe-proxy logs --follow")
@port_option
@click.option(
    "-n", "--lines", type=click.IntRange(min=0), default=50, show_default=True, help="lines from the end"
)
@click.option("-f", "--follow", is_flag=True, help="go on printing what is added")
@click.option("--proxy", "of_proxy", is_flag=True, help="the detached proxy's own output, not llama-server's")
def logs(port: int | None, lines: int, follow: bool, of_proxy: bool) -> None:
    """Print what llama-server logged."""
    paths = paths_of(load_settings({"port": port}))
    path = paths.proxy_log if of_proxy else paths.engine_log
    if not path.exists():
        raise NotRunningError(f"there is no log at {path}", "start a proxy with: moe-proxy start")
    with path.open(encoding="utf-8", errors="replace") as log:
        for line in deque(log, maxlen=lines):
            click.echo(line, nl=False)
        while follow:
            for line in log:
                click.echo(line, nl=False)
            time.sleep(_POLL_S)
