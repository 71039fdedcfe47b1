"""Owns HTTP/1.1 over a Unix socket, as a client of one server: which connections are kept, what breaks them.

It knows nothing of what is asked. It is here because every request takes this way twice, and a client for the
whole web costs more than all the rest of a request.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from pathlib import Path

from multidict import CIMultiDictProxy

from moe_proxy.http_answer import AnswerParser

# llama-server closes a connection that was idle for 5 s, and each idle one holds one of its threads.
_IDLE_S = 2.0
_MOST_IDLE = 8
# A server that does not read or a reader that does not take: more than this is not gathered.
_WRITE_BYTES = 64 << 10
_READ_BYTES = 256 << 10
_BACKLOG_PAUSE_S = 0.005
_CONNECT_S = 5.0


class ConnectFailedError(ConnectionError):
    """Nobody takes connections; nothing was sent."""


class UnansweredError(ConnectionError):
    """The connection ended before the first byte of an answer. ``reused``: it had served a request before."""

    def __init__(self, message: str, *, reused: bool) -> None:
        super().__init__(message)
        self.reused = reused


class BrokenAnswerError(ConnectionError):
    """The connection ended in the middle of an answer, or what came is no HTTP."""


class UnixHttp:
    """The client of one server. Belongs to one event loop; ``close`` it in the end."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._idle: list[tuple[float, _Connection]] = []
        self._open: set[_Connection] = set()

    async def send(
        self,
        method: str,
        target: str,
        headers: Iterable[tuple[str, str]] = (),
        body: bytes | None = None,
        timeout_s: float | None = None,
        *,
        fresh: bool = False,
    ) -> Response:
        """Send a request; the answer once its head is here.

        ``target`` is encoded, ``timeout_s`` bounds the whole exchange, ``fresh`` forbids a used connection.
        Raises ConnectFailedError, UnansweredError, BrokenAnswerError, TimeoutError.
        """
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
        if body is not None:
            lines.append(f"Content-Length: {len(body)}")
        head = "\r\n".join(lines)
        if head.count("\n") != len(lines) - 1 or head.count("\r") != len(lines) - 1 or target.count(" "):
            raise ValueError("a line break in a request's head, or a space in its target")
        connection = None if fresh else self._kept()
        if connection is None:
            connection = await self._connected()
        try:
            connection.begin(method, timeout_s)
            await connection.write(f"{head}\r\n\r\n".encode("utf-8", "surrogateescape"), body or b"")
            await connection.head()
        except BaseException:
            connection.abort()
            raise
        return Response(connection)

    def close(self) -> None:
        """Close every connection."""
        for connection in list(self._open):
            connection.abort()

    def _kept(self) -> _Connection | None:
        oldest_s = asyncio.get_running_loop().time() - _IDLE_S
        while self._idle:
            since_s, connection = self._idle.pop()
            if since_s >= oldest_s:
                connection.reused = True
                return connection
            connection.abort()
        return None

    async def _connected(self) -> _Connection:
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + _CONNECT_S
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            while True:
                try:
                    connection.connect(self._path)
                    break
                except BlockingIOError:
                    # Its backlog is full, and it is short. Nothing would tell when there is room again.
                    if loop.time() > give_up_s:
                        raise
                    await asyncio.sleep(_BACKLOG_PAUSE_S)
            _, protocol = await loop.create_unix_connection(lambda: _Connection(self), sock=connection)
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError):
                raise ConnectFailedError(f"cannot connect: {error.strerror or error}") from error
            raise
        return protocol

    def _opened(self, connection: _Connection) -> None:
        self._open.add(connection)

    def _free(self, connection: _Connection) -> None:
        """Its answer was read to the end."""
        if len(self._idle) < _MOST_IDLE:
            self._idle.append((asyncio.get_running_loop().time(), connection))
        else:
            connection.abort()

    def _lost(self, connection: _Connection) -> None:
        self._open.discard(connection)
        self._idle = [entry for entry in self._idle if entry[1] is not connection]


class Response:
    """An answer whose head has come. Close it in every case: that is how a server learns to stop."""

    def __init__(self, connection: _Connection) -> None:
        self._connection: _Connection | None = connection
        parser = connection.parser
        assert parser.headers is not None
        self.status = parser.status
        self.headers: CIMultiDictProxy[str] = parser.headers

    async def chunk(self) -> bytes:
        """The next bytes of the body; empty at the end. Raises BrokenAnswerError, TimeoutError."""
        connection = self._connection
        if connection is None:
            return b""
        data = await connection.chunk()
        if not data:
            self._connection = None
            connection.release()
        return data

    async def read(self) -> bytes:
        """The whole body. Raises BrokenAnswerError, TimeoutError."""
        pieces = []
        while data := await self.chunk():
            pieces.append(data)
        return b"".join(pieces)

    def close(self) -> None:
        """Close the connection for good, unless the answer was read to its end."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()


class _Connection(asyncio.Protocol):
    """One connection, with at most one request at a time."""

    def __init__(self, client: UnixHttp) -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._error: Exception | None = None
        self._chunks: list[bytes] = []
        self._size = 0
        self._reading = True
        self._writable = True
        self._busy = False
        self.reused = False
        self.parser = AnswerParser("GET")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._client._opened(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._client._lost(self)
        if self._busy:
            self._ended()

    def eof_received(self) -> bool:
        return False

    def data_received(self, data: bytes) -> None:
        if not self._busy or self.parser.complete:
            self.abort()
            return
        try:
            body = self.parser.feed(data)
        except ValueError as error:
            self._fail(BrokenAnswerError(str(error)))
            return
        if body:
            self._chunks.append(body)
            self._size += len(body)
            if self._size > _READ_BYTES and self._reading and self._transport is not None:
                self._reading = False
                self._transport.pause_reading()
        self._wake()

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._wake()

    def begin(self, method: str, timeout_s: float | None) -> None:
        """A new exchange."""
        self.parser = AnswerParser(method)
        self._busy = True
        if timeout_s is not None:
            late = asyncio.TimeoutError(f"no answer within {timeout_s:g} s")
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self._fail, late)

    async def write(self, head: bytes, body: bytes) -> None:
        """Send a request, in pieces where it is long; an answer that comes meanwhile ends that."""
        for start in range(0, max(1, len(body)), _WRITE_BYTES):
            while not self._writable and self._error is None and not self.parser.status:
                await self._wait()
            if self._transport is None or self._error is not None or self.parser.status:
                # What is left unsent would be taken for the next request.
                self.parser.reusable = False
                return
            piece = body[start : start + _WRITE_BYTES] if len(body) > _WRITE_BYTES else body
            self._transport.write(head + piece if start == 0 else piece)

    async def head(self) -> None:
        """Wait for the answer's head."""
        while self.parser.headers is None:
            if self._error is not None:
                raise self._error
            if self._transport is None:
                self._ended()
                continue
            await self._wait()

    async def chunk(self) -> bytes:
        """Body bytes; empty at the end."""
        while True:
            if self._chunks:
                data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
                self._chunks.clear()
                self._size = 0
                if not self._reading and self._transport is not None:
                    self._reading = True
                    self._transport.resume_reading()
                return data
            if self.parser.complete:
                return b""
            if self._error is not None:
                raise self._error
            await self._wait()

    def release(self) -> None:
        """The exchange is over: keep the connection, where both sides want that."""
        self._busy = False
        self._stop_timer()
        if self._transport is None:
            return
        if self.parser.reusable and not self._transport.is_closing():
            self._client._free(self)
        else:
            self._transport.abort()

    def abort(self) -> None:
        """Close at once, whatever is under way."""
        self._busy = False
        self._stop_timer()
        if self._transport is not None:
            self._transport.abort()

    def _ended(self) -> None:
        """The other side has closed."""
        if self.parser.ended():
            self._wake()
        elif self.parser.begun:
            self._fail(BrokenAnswerError("the answer was not complete"))
        else:
            self._fail(UnansweredError("closed before an answer", reused=self.reused))

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
