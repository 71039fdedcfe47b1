"""Owns the sockets: which addresses are bound, and the way from listening to closed that cuts no stream."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from moe_proxy.errors import ConfigError, RequestError
from moe_proxy.proxy.server import ADMISSION, LIVE

_BACKLOG = 1024
_FREE_PORT_TRIES = 16
# What bind says where there is no IPv6.
_NO_IPV6 = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT})

_CLIENTS_FAULTS = (HttpProcessingError, web.RequestPayloadError, RequestError, ConnectionError)


class _NotTheClientsFault(logging.Filter):
    """Drops what any client can cause at will, by sending what is no HTTP or by going away."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether ``record`` is worth a line."""
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, _CLIENTS_FAULTS)


_logger = logging.getLogger(f"{__name__}.http")
_logger.addFilter(_NotTheClientsFault())


class Listening:
    """A running server of ``app``. ``port`` is the bound one; ``addresses`` are those it listens on.

    On a Unix socket the port is 0 and the address a path.
    """

    def __init__(self, app: web.Application, runner: web.AppRunner, sites: Sequence[web.SockSite], port: int,
                 addresses: tuple[str, ...]) -> None:  # fmt: skip
        self.app = app
        self._runner = runner
        self._sites = sites
        self.port = port
        self.addresses = addresses

    @property
    def url(self) -> str:
        """For clients on this machine."""
        host = self.addresses[0]
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    async def stop(self, drain_s: float | None = None) -> None:
        """Stop accepting, let running streams finish, close.

        ``drain_s`` is how long at most; None: as configured. Streams that are left then get an error in their
        own form. The follow-ups of all requests are waited for. A second call does nothing.
        """
        sites, self._sites = self._sites, ()
        if not sites:
            return
        for site in sites:
            await site.stop()
        limit_s = self.app[LIVE].context.limits.drain_s if drain_s is None else drain_s
        await self.app[ADMISSION].drain(limit_s)
        await self._runner.cleanup()

    async def cut(self) -> None:
        """Do not wait any longer: a ``stop`` under way cuts its streams now."""
        await self.app[ADMISSION].drain(0)


async def serve(app: web.Application, host: str, port: int) -> Listening:
    """Listen on ``host``; 127.0.0.1 and localhost mean ::1 too, where there is IPv6. Port 0 finds a free one.

    Raises ConfigError when the port is taken or the address is not this machine's.
    """
    return await _serving(app, _bind(host, port))


async def serve_unix(app: web.Application, path: Path) -> Listening:
    """Listen on a new Unix socket at ``path``, for this user alone. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        os.chmod(path, 0o600)  # noqa: PTH101 - of a socket, at once
    except BaseException:
        listener.close()
        raise
    return await _serving(app, [listener])


async def _serving(app: web.Application, bound: list[socket.socket]) -> Listening:
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0, logger=_logger
    )
    try:
        await runner.setup()
        sites = [web.SockSite(runner, listener, backlog=_BACKLOG) for listener in bound]
        for site in sites:
            await site.start()
    except BaseException:
        for listener in bound:
            listener.close()
        await runner.cleanup()
        raise
    names = [listener.getsockname() for listener in bound]
    if isinstance(names[0], str):
        return Listening(app, runner, sites, 0, tuple(names))
    return Listening(app, runner, sites, names[0][1], tuple(name[0] for name in names))


def free_port(host: str, port: int) -> int:
    """``port``, or for 0 one that is free, after it was seen that ``serve`` could have it now.

    Raises ConfigError as ``serve`` does.
    """
    bound = _bind(host, port)
    number: int = bound[0].getsockname()[1]
    for listener in bound:
        listener.close()
    return number


def _bind(host: str, port: int) -> list[socket.socket]:
    """The listening sockets. With port 0, both families get the same free port."""
    if host not in ("127.0.0.1", "localhost"):
        return [_bound(host, port)]
    for _ in range(_FREE_PORT_TRIES):
        first = _bound("127.0.0.1", port)
        try:
            return [first, _bound("::1", first.getsockname()[1])]
        except OSError as error:
            if error.errno in _NO_IPV6:
                return [first]
            first.close()
            raise
        except ConfigError:
            first.close()
            if port != 0:
                raise
    raise ConfigError("no free port on both 127.0.0.1 and ::1", "name one with --port")


def _bound(host: str, port: int) -> socket.socket:
    """One socket. Raises ConfigError for what the user can change, OSError where there is no IPv6."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError as error:
        raise ConfigError(
            f"host {host!r} is no IP address", "use 127.0.0.1, or an address of yours"
        ) from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port))
        # At once: until one of them listens, two sockets with SO_REUSEADDR can be bound to one port.
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {host} is in use", "stop the program that holds it or choose another --port"
            ) from error
        if error.errno == errno.EACCES:
            raise ConfigError(
                f"port {port} may not be opened by this user", "choose one from 1024 on"
            ) from error
        if error.errno in _NO_IPV6 and host != "::1":
            raise ConfigError(f"{host} is no address of this machine", "see: ip address") from error
        if error.errno in _NO_IPV6:
            raise
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}", "choose another --host or --port"
        ) from error
    return listener
