"""Owns the connection to llama-server: sending, waiting for it, and what a broken connection means.

It never reads or changes what is sent. Connections are kept for a moment; llama-server closes idle ones by
itself, so a kept one may be closed just when a request is sent: that is tried again, once, on a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from multidict import CIMultiDict, CIMultiDictProxy

from moe_proxy.errors import EngineGoneError, RequestError
from moe_proxy.proxy.context import Backend, Clocks, Limits
from moe_proxy.unix_http import ConnectFailedError, Response, UnansweredError, UnixHttp

_RETRY_PAUSE_S = 0.05
# How long a killed engine may take to let go of its memory; until then its socket takes connections.
_DYING_S = 1.0
_GONE_HINT = "it is being restarted; try again"


class Answer:
    """A response whose head has come. Close it in every case: that is how llama-server learns to stop."""

    def __init__(self, response: Response, held_ns: int) -> None:
        self._response = response
        self.held_ns = held_ns

    @property
    def status(self) -> int:
        """HTTP status."""
        return self._response.status

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        """As they came."""
        return self._response.headers

    @property
    def is_event_stream(self) -> bool:
        """Whether the body is server-sent events."""
        content_type = self._response.headers.get("Content-Type", "")
        return content_type.partition(";")[0].strip().lower() == "text/event-stream"

    async def chunk(self) -> bytes:
        """The next bytes as they came; empty at the end. Raises EngineGoneError when the body breaks off."""
        try:
            return await self._response.chunk()
        except OSError as error:
            raise _broke_off() from error

    async def read(self) -> bytes:
        """The whole body. Raises EngineGoneError when it breaks off."""
        try:
            return await self._response.read()
        except OSError as error:
            raise _broke_off() from error

    def close(self) -> None:
        """Close the connection at once, unless the body was read to its end."""
        self._response.close()


class Upstream:
    """The client of the one llama-server. Made and closed inside the event loop."""

    def __init__(self, backend: Backend, limits: Limits, clocks: Clocks) -> None:
        self._backend = backend
        self._limits = limits
        self._clocks = clocks
        self._http = UnixHttp(backend.socket)

    async def close(self) -> None:
        """Close every connection."""
        self._http.close()

    async def send(
        self, method: str, target: str, headers: Mapping[str, str] | CIMultiDict[str], body: bytes | None
    ) -> Answer:
        """Hold until the engine is ready, send, and return once the head of the answer is here.

        ``target`` is a path with its query, encoded. Raises EngineError: it did not become ready, or the
        connection broke. A refused connection, over which nothing was sent, is tried again for a while: the
        engine may have died before anybody noticed. So is, once, one that an engine took while it was dying.
        """
        began_ns = self._clocks.monotonic_ns()
        give_up_s = self._clocks.monotonic_s() + self._limits.hold_timeout_s
        refused, lost, fresh = 0, False, False
        while True:
            await self._backend.ready(max(0.0, give_up_s - self._clocks.monotonic_s()))
            held_ns = self._clocks.monotonic_ns() - began_ns
            sent_s = self._clocks.monotonic_s()
            try:
                response = await self._http.send(method, target, headers.items(), body, fresh=fresh)
                return Answer(response, held_ns)
            except ValueError as error:
                raise RequestError(f"the request cannot be forwarded: {error}") from error
            except ConnectFailedError as error:
                refused += 1
                if refused * _RETRY_PAUSE_S > self._limits.connect_retry_s:
                    raise EngineGoneError("llama-server does not accept connections", _GONE_HINT) from error
                await asyncio.sleep(_RETRY_PAUSE_S)
            except OSError as error:
                # Once and early: a request that kills the engine must not go on killing it, and what was
                # computed for a while is not computed again behind the client's back.
                unanswered = isinstance(error, UnansweredError)
                if lost or not unanswered or self._clocks.monotonic_s() - sent_s > _DYING_S:
                    raise EngineGoneError(
                        "llama-server closed the connection unanswered", _GONE_HINT
                    ) from error
                lost = fresh = True
                if not (isinstance(error, UnansweredError) and error.reused):
                    await asyncio.sleep(_RETRY_PAUSE_S)


def _broke_off() -> EngineGoneError:
    return EngineGoneError("llama-server closed the stream before the answer was complete", _GONE_HINT)
