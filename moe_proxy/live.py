"""Owns which settings may change while the proxy runs, and what becomes of them.

It turns settings into what the HTTP surface works with, and never reads a request.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from types import TracebackType

from moe_proxy.access import key_digests
from moe_proxy.config import Settings
from moe_proxy.errors import ConfigError
from moe_proxy.proxy.access_log import access_log
from moe_proxy.proxy.context import ProxyContext, SecurityPolicy
from moe_proxy.proxy.parameters import ParameterFilter

logger = logging.getLogger(__name__)

# Everything else decides how the engine or the sockets were made.
LIVE = frozenset(
    {"access_log", "aliases", "allowed_hosts", "allowed_origins", "api_key", "api_key_file", "drain_s",
     "max_in_flight", "ollama_defaults", "open_routes", "set_parameters", "strip_parameters", "unknown_model",
     "unknown_model_openai"}
)  # fmt: skip


def with_settings(context: ProxyContext, settings: Settings) -> ProxyContext:
    """``context`` with everything in it that may change while the proxy runs.

    Reads the key file: not for the event loop. Raises ConfigError for the keys.
    """
    return replace(
        context,
        model=replace(context.model, aliases=settings.aliases),
        limits=replace(context.limits, drain_s=settings.drain_s, max_in_flight=settings.max_in_flight),
        security=SecurityPolicy(
            host_name=socket.gethostname(),
            allowed_hosts=settings.allowed_hosts,
            allowed_origins=settings.origins,
            key_digests=key_digests(settings),
        ),
        open_routes=frozenset(settings.open_routes),
        unknown_model=settings.unknown_model,
        unknown_model_openai=settings.unknown_model_openai,
        parameters=ParameterFilter(
            settings.strip_parameters, settings.set_parameters, settings.ollama_defaults
        ),
        access_log=access_log(settings.access_log),
    )


def needing_restart(running: Settings, wanted: Settings) -> list[str]:
    """Names of the settings that differ and cannot change now."""
    return sorted(
        name
        for name in type(running).model_fields
        if name not in LIVE and getattr(running, name) != getattr(wanted, name)
    )


class Reloading(AbstractAsyncContextManager["Reloading"]):
    """The task that reads the settings anew whenever it is asked to, one time after the other.

    ``load`` reads them (it may block and raise ConfigError), ``change`` is given the new context, and
    ``announce`` a line about what came of it. Wrong settings change nothing. ``around`` is
    entered for as long as one reading takes.
    """

    def __init__(
        self,
        running: Settings,
        context: ProxyContext,
        load: Callable[[], Settings],
        change: Callable[[ProxyContext], None],
        announce: Callable[[str], None],
        around: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        self._running = running
        self._context = context
        self._load = load
        self._change = change
        self._announce = announce
        self._around = around
        self._asked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Reloading:
        self._task = asyncio.create_task(self._run(), name="reloading")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def ask(self) -> None:
        """For a signal handler: it only notes."""
        self._asked.set()

    async def _run(self) -> None:
        while True:
            await self._asked.wait()
            self._asked.clear()
            async with self._around():
                await self._reload()

    async def _reload(self) -> None:
        try:
            wanted = await asyncio.to_thread(self._load)
            context = await asyncio.to_thread(with_settings, self._context, wanted)
        except ConfigError as error:
            self._announce(f"Settings not reloaded, the old ones hold: {error}.")
            return
        except Exception:
            logger.exception("settings not reloaded, the old ones hold")
            return
        self._change(context)
        later = needing_restart(self._running, wanted)
        self._announce(
            f"Settings reloaded; needing a restart: {', '.join(later)}." if later else "Settings reloaded."
        )
