"""Owns what a service manager such as systemd is told: that we are ready, reload, stop. See sd_notify(3).

Without a service manager it says nothing. It never fails a run, and waits seconds at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Mapping

logger = logging.getLogger(__name__)

VARIABLE = "NOTIFY_SOCKET"
# For a service manager whose queue is full; no run hangs on it.
_PATIENCE_S = 5.0


class ServiceNotifier:
    """The way to whoever started this process and waits for word, from ``environment``'s NOTIFY_SOCKET."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment.get(VARIABLE, "")
        self._ready = False

    async def loading(self, what: str) -> None:
        """We live and answer, but the model is not there yet."""
        await self._send(f"STATUS=loading {what}")

    async def ready(self, what: str) -> None:
        """What depends on this service may start."""
        self._ready = True
        await self._send("READY=1", f"STATUS=serving {what}")

    async def stopping(self) -> None:
        """Running requests finish; no new ones are taken."""
        await self._send("STOPPING=1", "STATUS=stopping")

    @contextlib.asynccontextmanager
    async def reloading(self) -> AsyncIterator[None]:
        """Settings are read anew inside. Not a word before the first READY: it would be said too early."""
        if self._ready:
            # The time tells this reload from an earlier one; systemd asks for CLOCK_MONOTONIC.
            now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
            await self._send("RELOADING=1", f"MONOTONIC_USEC={now_us}")
        try:
            yield
        finally:
            if self._ready:
                await self._send("READY=1")

    async def _send(self, *assignments: str) -> None:
        if not self._address.startswith(("/", "@")):
            return
        # An abstract socket is written with an at sign and named with a zero byte.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.connect(address)
                sending = asyncio.get_running_loop().sock_sendall(sender, "\n".join(assignments).encode())
                await asyncio.wait_for(sending, _PATIENCE_S)
        except (OSError, asyncio.TimeoutError) as error:
            logger.warning("the service manager at %s does not hear us: %r", self._address, error)
