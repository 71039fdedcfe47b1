"""Owns the wiring of a proxy for this process alone: what ``moe-proxy start`` makes, but on a Unix socket.

It reads no command line and prints nothing.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from moe_proxy.app import surface
from moe_proxy.completions import ProxyClient
from moe_proxy.config import Settings
from moe_proxy.engine.build import build_engine, check_server, engine_for
from moe_proxy.engine.launch import refuse_our_flags
from moe_proxy.engine.recipe import BuildRequest
from moe_proxy.errors import ConfigError
from moe_proxy.instance import InstancePaths, claimed
from moe_proxy.proxy.listening import serve_unix
from moe_proxy.proxy.server import make_app
from moe_proxy.served import Served, examine

_log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Told of a stage of the preparations and of how much of it is done, 0 to 1; from any thread."""

_SETTLE_S = 2.0
# What the configuration says of the port, its guards and its log is not about a socket inside this process.
_OF_THE_PORT = ("aliases", "host", "insecure", "port", "api_key", "api_key_file", "allowed_hosts",
                "allowed_origins", "open_routes", "unknown_model", "unknown_model_openai", "access_log",
                "keep_alive_policy", "keep_alive")  # fmt: skip


def without_port(settings: Settings) -> Settings:
    """``settings`` with the defaults for all that is about a port and whoever comes there."""
    plain = {name: Settings.model_fields[name].get_default() for name in _OF_THE_PORT}
    return settings.model_copy(update=plain)


@dataclass(frozen=True)
class Prepared:
    """A model that was examined, and the llama-server to serve it with."""

    served: Served
    server: Path
    engine_args: tuple[str, ...] = ()


def prepare(settings: Settings, engine_args: tuple[str, ...], progress: Progress) -> Prepared:
    """Examine the model, find the engine, and build it if it is not there: that blocks for minutes.

    Raises UsageError for what is wrong with the model or the settings, BuildError.
    """
    refuse_our_flags(engine_args)
    served = examine(settings, progress)
    if settings.engine is not None:
        return Prepared(served, check_server(settings.engine), engine_args)
    request = BuildRequest(cache_dir=settings.cache_dir, cuda=settings.gpu)
    engine = engine_for(request)
    if engine is None:
        _log.info("building llama-server with the expert pager; this happens once")
        engine = build_engine(request, progress)
    return Prepared(served, engine.server, engine_args)


@asynccontextmanager
async def private_proxy(prepared: Prepared) -> AsyncIterator[ProxyClient]:
    """A proxy for this process alone, its model ready; its client. Nothing of it is left at the end.

    Raises EngineStartError when the model cannot be loaded, ConfigError.
    """
    settings = prepared.served.settings
    async with AsyncExitStack() as stack:
        # In it lie the sockets, llama-server's log, and what is learned of the traffic meanwhile.
        made = await asyncio.to_thread(_folder_in, settings.runtime_dir)
        folder = Path(stack.enter_context(made))
        paths = InstancePaths(0, folder, folder)
        paths.prepare()
        stack.enter_context(claimed(paths))
        behind = await stack.enter_async_context(
            surface(prepared.served, prepared.server, paths, prepared.engine_args)
        )
        socket = folder / "proxy.sock"
        listening = await serve_unix(make_app(behind.context), socket)
        # The client is closed first, and with it all that is under way: what is left is to take note of that.
        stack.push_async_callback(listening.stop, _SETTLE_S)
        await behind.supervisor.ready(settings.ready_timeout_s)
        client = ProxyClient("http://localhost", aiohttp.UnixConnector(str(socket), limit=0))
        stack.push_async_callback(client.close)
        yield client


def _folder_in(runtime_dir: Path) -> tempfile.TemporaryDirectory[str]:
    """A new folder, after those that nobody uses any more are removed. Raises ConfigError."""
    try:
        runtime_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        _sweep(runtime_dir)
        return tempfile.TemporaryDirectory(prefix="library-", dir=runtime_dir)
    except OSError as error:
        raise ConfigError(
            f"cannot use {runtime_dir}: {error.strerror or error}",
            "set MOE_PROXY_RUNTIME_DIR to a folder you may write",
        ) from error


def _sweep(runtime_dir: Path) -> None:
    """Remove the folders of processes that were killed; their engines have ended with them."""
    for folder in runtime_dir.glob("library-*"):
        paths = InstancePaths(0, folder, folder)
        if not paths.lock.exists():
            continue  # being made just now, or removed
        try:
            with claimed(paths):
                shutil.rmtree(folder, ignore_errors=True)
        except (ConfigError, OSError):
            continue  # in use, or of another user
