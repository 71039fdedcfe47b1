"""Owns ``start``, ``stop`` and ``status``: the life of a proxy as seen from a shell."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import click
import psutil
from rich.console import Console

from moe_proxy.access import key_digests
from moe_proxy.app import serve
from moe_proxy.cli.build import built_engine, progress_report
from moe_proxy.cli.client import find_proxy, get_json, paths_of
from moe_proxy.cli.memory_picture import short
from moe_proxy.cli.options import refuse_words, serving_options
from moe_proxy.config import Settings, load_settings
from moe_proxy.engine.build import check_server
from moe_proxy.engine.launch import refuse_our_flags
from moe_proxy.engine.recipe import BuildRequest
from moe_proxy.errors import ConfigError, EngineStartError, NotRunningError
from moe_proxy.forecast import forecast
from moe_proxy.instance import InstancePaths, RunningProxy, claimed, running_proxy, runs
from moe_proxy.model.demo import DEMO_NAME
from moe_proxy.model.demo_source import demo_file
from moe_proxy.proxy.listening import free_port
from moe_proxy.served import AUTO, Served, case_of, examine

_POLL_S = 0.1
# Beyond the times that the proxy itself keeps, for starting and ending as a process.
_SLACK_S = 30.0

port_option = click.option("--port", type=click.IntRange(0, 65535), help="port of the proxy")


def check_port_is_free(settings: Settings, paths: InstancePaths) -> None:
    """Raise ConfigError when the port is taken, before anything slow begins."""
    proxy = running_proxy(paths)
    if proxy is not None:
        raise ConfigError(
            f"a proxy runs on port {settings.port} already (pid {proxy.pid})",
            f"stop it with moe-proxy stop --port {settings.port}, or choose another --port",
        )
    free_port(settings.host, settings.port)


def engine_for_start(settings: Settings, source: Path | None, console: Console) -> Path:
    """The llama-server to run: the one the settings name, or our own build, made now if need be."""
    if settings.engine is not None:
        return check_server(settings.engine)
    request = BuildRequest(cache_dir=settings.cache_dir, source=source, cuda=settings.gpu)
    return built_engine(request, console).server


@click.command(epilog="Example: moe-proxy start --model qwen3-30b-a3b-q4_k_m.gguf --ram-budget 12G -- -fa on")
@serving_options
@click.option(
    "--source", type=click.Path(path_type=Path), help="a llama.cpp tree to build instead of the pinned one"
)
@click.option("--detach", is_flag=True, help="return once the model is ready; the proxy goes on")
@click.argument("engine_args", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGS FOR LLAMA-SERVER]")
def start(source: Path | None, detach: bool, engine_args: tuple[str, ...], **flags: Any) -> None:
    """Serve a model on port 11435 for OpenAI and Ollama clients; build llama-server when needed."""
    refuse_words(engine_args)
    refuse_our_flags(engine_args)
    settings = load_settings(flags)
    if settings.port == 0:
        settings = settings.model_copy(update={"port": free_port(settings.host, 0)})
    flags["port"] = settings.port
    key_digests(settings)
    console = Console(stderr=True)
    paths = paths_of(settings)
    check_port_is_free(settings, paths)
    served = examined(settings, console)
    paths.prepare()
    server = engine_for_start(settings, source, console)
    describe(served, console)
    if detach:
        # The same sources as here, so that the same can be reloaded.
        told = {name: value for name, value in flags.items() if value is not None} | {"engine": server}
        if settings.model == Path(AUTO):
            # Chosen once: by then there may be less memory, and the choice another.
            told["model"] = served.model
        start_detached(settings, os.environ | variables(told), engine_args, paths, console)
    else:
        announce = partial(say, console)
        asyncio.run(serve(served, server, paths, engine_args, announce, lambda: load_settings(flags)))


def examined(settings: Settings, console: Console, **more: Any) -> Served:
    """``examine`` with the same keywords, and say so where the demonstration model has to be made first."""
    if (settings.model or Path(DEMO_NAME)) != Path(DEMO_NAME) or demo_file(settings.cache_dir).is_file():
        return examine(settings, **more)
    say(console, "Making the demonstration model; this happens once.")
    with progress_report(console) as report:
        return examine(settings, report, **more)


def variables(told: Mapping[str, object]) -> dict[str, str]:
    """Settings as environment variables."""
    return {f"MOE_PROXY_{name.upper()}": _text(value) for name, value in told.items()}


def these_alone(settings: Settings, server: Path) -> dict[str, str]:
    """The environment of a proxy with these settings and no others, without a key.

    What was left out on purpose must not come back from a variable or a file.
    """
    told = settings.model_dump(exclude_none=True, exclude={"api_key", "api_key_file"}) | {"engine": server}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MOE_PROXY_")}
    return kept | variables(told) | {"MOE_PROXY_CONFIG": os.devnull}


def _text(value: object) -> str:
    """As the settings read it from a variable."""
    if isinstance(value, tuple):
        return ",".join(value)
    return json.dumps(value) if isinstance(value, dict) else str(value)


def say(console: Console, line: str) -> None:
    """Print one line as it is: a terminal may wrap it, a file must not."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def describe(served: Served, console: Console) -> None:
    """Say in a few lines what is going to run."""
    reason = served.plan.reason
    for line in (f"{reason[:1].upper()}{reason[1:]}.", *short(forecast(case_of(served))), *served.notes):
        say(console, line)


def start_detached(
    settings: Settings,
    environment: Mapping[str, str],
    engine_args: tuple[str, ...],
    paths: InstancePaths,
    console: Console,
) -> None:
    """Run the same start in a process of its own, whose settings come from ``environment``.

    Return when it is ready. Raises EngineStartError.
    """
    argv = [sys.executable, "-m", "moe_proxy", "start", "--", *engine_args]
    with claimed(paths):
        paths.proxy_log.write_bytes(b"")
    with paths.proxy_log.open("ab") as log:
        process = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _until_ready(process, settings, paths, console)
    except BaseException:
        # Refused, too slow or interrupted: nothing goes on behind the back of whoever was told so.
        process.terminate()
        raise


def _until_ready(
    process: subprocess.Popen[bytes], settings: Settings, paths: InstancePaths, console: Console
) -> None:
    # The proxy itself gives up at this time, and knows better why.
    deadline = time.monotonic() + settings.ready_timeout_s + _SLACK_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            said = paths.proxy_log.read_text(encoding="utf-8", errors="replace")
            raise _ended(process.returncode, said, paths)
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
    raise EngineStartError(
        f"not ready within {settings.ready_timeout_s:g} s", f"see {paths.engine_log}, raise ready_timeout_s"
    )


def _ended(code: int, said: str, paths: InstancePaths) -> EngineStartError:
    """Why a detached proxy that ended with ``code`` did so, from all that it ``said``."""
    _, marked, reason = said.rpartition("moe-proxy: ")
    if marked:
        # Lines that belong to the reason are indented.
        first, *rest = reason.splitlines()
        reason = "\n".join((first, *takewhile(lambda line: line.startswith(" "), rest)))
    elif code == 0:
        return EngineStartError("the proxy was stopped while the model was loading", "start it again")
    elif not said:
        return EngineStartError(
            f"the proxy ended with code {code} and could say nothing",
            f"is there room on the disk of {paths.proxy_log}?",
        )
    else:
        reason = f"it ended with code {code}: {said.strip()[-200:]}"
    return EngineStartError(f"the proxy could not start: {reason}", f"more in {paths.proxy_log}")


@click.command(epilog="Example: moe-proxy stop")
@port_option
@click.option("--now", is_flag=True, help="do not wait for running streams")
def stop(port: int | None, now: bool) -> None:
    """Stop the proxy: running streams finish first."""
    settings = load_settings({"port": port})
    end_proxy(find_proxy(settings), settings.drain_s, now=now)
    click.echo(f"Stopped the proxy on port {settings.port}.")


def end_proxy(proxy: RunningProxy, drain_s: float, *, now: bool) -> None:
    """SIGTERM to ``proxy``, a second one if it is to end ``now``; return when it has ended."""
    try:
        process = psutil.Process(proxy.pid)
        process.send_signal(signal.SIGTERM)
        if now:
            # The second SIGTERM means at once; it must not melt into the first.
            time.sleep(_POLL_S)
            process.send_signal(signal.SIGTERM)
    except psutil.NoSuchProcess:
        return
    except psutil.AccessDenied as error:
        raise NotRunningError(
            f"the proxy (pid {proxy.pid}) belongs to {process.username()}", "stop it as that user"
        ) from error
    # Not psutil's wait: where nobody waits for orphans (in many a container), a zombie stays for ever.
    deadline = time.monotonic() + drain_s + _SLACK_S
    while runs(proxy):
        if time.monotonic() > deadline:
            raise EngineStartError(
                f"the proxy (pid {proxy.pid}) has not ended", f"end it with: kill -9 {proxy.pid}"
            )
        time.sleep(_POLL_S)


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
