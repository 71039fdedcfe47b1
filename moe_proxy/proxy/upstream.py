"""Owns the connection to llama-server: sending, waiting for it, and what a broken connection means.

It never reads or changes what is sent. One connection per request: llama-server closes idle ones after a few
seconds, and a request lost to that race could not be told from one that was being computed.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from moe_proxy.errors import EngineGoneError
from moe_proxy.proxy.context import Backend, Clocks, Limits

_RETRY_PAUSE_S = 0.05
# How long a killed engine may take to let go of its memory; until then its socket takes connections.
_DYING_S = 1.0
_ONE_WRITE_BYTES = 64 << 10
_GONE_HINT = "it is being restarted; try again"


class Answer:
    """A response whose head has come. Close it in every case: that is how llama-server learns to stop."""

    def __init__(self, response: aiohttp.ClientResponse, held_ns: int) -> None:
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
        return self._response.content_type == "text/event-stream"

    async def chunk(self) -> bytes:
        """The next bytes as they came; empty at the end. Raises EngineGoneError when the body breaks off."""
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise _broke_off() from error

    async def read(self) -> bytes:
        """The whole body. Raises EngineGoneError when it breaks off."""
        try:
            return await self._response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise _broke_off() from error

    def close(self) -> None:
        """Close the connection, at once and for good."""
        self._response.close()


class Upstream:
    """The client of the one llama-server. Made and closed inside the event loop."""

    def __init__(self, backend: Backend, limits: Limits, clocks: Clocks) -> None:
        self._backend = backend
        self._limits = limits
        self._clocks = clocks
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path=str(backend.socket), limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=None),
            auto_decompress=False,
            trust_env=False,
            skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

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
        refused, lost = 0, False
        while True:
            await self._backend.ready(max(0.0, give_up_s - self._clocks.monotonic_s()))
            held_ns = self._clocks.monotonic_ns() - began_ns
            sent_s = self._clocks.monotonic_s()
            try:
                return Answer(await self._request(method, target, headers, body), held_ns)
            except aiohttp.ClientConnectorError as error:
                refused += 1
                if refused * _RETRY_PAUSE_S > self._limits.connect_retry_s:
                    raise EngineGoneError("llama-server does not accept connections", _GONE_HINT) from error
                await asyncio.sleep(_RETRY_PAUSE_S)
            except (aiohttp.ClientError, OSError) as error:
                # Once and early: a request that kills the engine must not go on killing it, and what was
                # computed for a while is not computed again behind the client's back.
                if lost or self._clocks.monotonic_s() - sent_s > _DYING_S:
                    raise EngineGoneError(
                        "llama-server closed the connection unanswered", _GONE_HINT
                    ) from error
                lost = True
                await asyncio.sleep(_RETRY_PAUSE_S)

    async def _request(
        self, method: str, target: str, headers: Mapping[str, str] | CIMultiDict[str], body: bytes | None
    ) -> aiohttp.ClientResponse:
        return await self._session.request(
            method,
            URL(f"http://localhost{target}", encoded=True),
            headers=headers,
            data=_payload(body),
            allow_redirects=False,
        )


def _payload(body: bytes | None) -> bytes | io.BytesIO | None:
    """A large body as a file: it is then written in pieces instead of in one go on the event loop."""
    return body if body is None or len(body) <= _ONE_WRITE_BYTES else io.BytesIO(body)


def _broke_off() -> EngineGoneError:
    return EngineGoneError("llama-server closed the stream before the answer was complete", _GONE_HINT)
