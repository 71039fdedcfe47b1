"""The client of the engine's socket: what it uses again, what breaks it, and that nothing is left."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from moe_proxy import unix_http
from moe_proxy.unix_http import BrokenAnswerError, ConnectFailedError, UnansweredError, UnixHttp
from tests.support.surface import eventually

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
Serve = Callable[["Server", Reader, Writer], Awaitable[None]]
HELLO = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


class Server:
    """Connections that a script answers; ``connections`` counts them, ``open`` are those not yet closed."""

    def __init__(self, path: Path, serve: Serve) -> None:
        self.path = path
        self.connections = self.open = self.requests = 0
        self._serve = serve

    async def handle(self, reader: Reader, writer: Writer) -> None:
        """One connection."""
        self.connections += 1
        self.open += 1
        try:
            await self._serve(self, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[tuple[Server, UnixHttp]]:
    """A server and a client of it; afterwards the client has closed everything."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder) / "s", serve)
        listener = await asyncio.start_unix_server(server.handle, str(server.path))
        client = UnixHttp(server.path)
        try:
            yield server, client
        finally:
            client.close()
            await eventually(lambda: server.open == 0)
            listener.close()


async def _request(reader: Reader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((line for line in head.split(b"\r\n") if line.startswith(b"Content-Length")), b": 0")
    return head + await reader.readexactly(int(length.partition(b":")[2]))


async def answer(server: Server, reader: Reader, writer: Writer) -> None:
    """Every request of a connection gets the same answer."""
    while True:
        await _request(reader)
        server.requests += 1
        writer.write(HELLO)


async def _ask(client: UnixHttp) -> bytes:
    response = await client.send("GET", "/")
    try:
        return await response.read()
    finally:
        response.close()


async def test_a_connection_is_used_again() -> None:
    """After an answer was read to its end its connection serves the next request."""
    async with serving(answer) as (server, client):
        for _ in range(5):
            assert await _ask(client) == b"hello"
        assert (server.connections, server.requests) == (1, 5)


async def test_an_answer_that_is_not_read_closes_its_connection() -> None:
    """Closing an answer before its end closes the connection: that is how a server learns to stop."""

    async def endless(server: Server, reader: Reader, writer: Writer) -> None:
        await _request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while not reader.at_eof():
            writer.write(b"1\r\nx\r\n")
            await writer.drain()
            await asyncio.sleep(0)

    async with serving(endless) as (server, client):
        response = await client.send("GET", "/")
        assert (await response.chunk()).startswith(b"x")
        response.close()
        await eventually(lambda: server.open == 0)


async def test_few_idle_connections_are_kept() -> None:
    """Of many parallel connections a few are kept: each idle one holds a thread of llama-server."""
    async with serving(answer) as (server, client):
        await asyncio.gather(*(_ask(client) for _ in range(40)))
        await eventually(lambda: server.open <= unix_http._MOST_IDLE)
        assert await _ask(client) == b"hello"


async def test_old_idle_connections_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that was idle for long is not trusted."""
    monkeypatch.setattr(unix_http, "_IDLE_S", -1.0)
    async with serving(answer) as (server, client):
        await _ask(client)
        await _ask(client)
        assert server.connections == 2


@pytest.mark.parametrize("kept", [False, True])
async def test_closed_without_an_answer(kept: bool) -> None:
    """A connection that ends before any byte of an answer says whether it had been used before."""

    async def once(server: Server, reader: Reader, writer: Writer) -> None:
        for number in range(2):
            await _request(reader)
            if number == int(kept):
                return
            writer.write(HELLO)

    async with serving(once) as (_, client):
        if kept:
            assert await _ask(client) == b"hello"
        with pytest.raises(UnansweredError) as caught:
            await _ask(client)
        assert caught.value.reused is kept


async def test_an_idle_connection_that_the_server_closed_is_forgotten() -> None:
    """A server that closes an idle connection costs the next request nothing."""

    async def once(server: Server, reader: Reader, writer: Writer) -> None:
        await _request(reader)
        writer.write(HELLO)

    async with serving(once) as (server, client):
        assert await _ask(client) == b"hello"
        await eventually(lambda: not client._open)
        assert await _ask(client) == b"hello"
        assert server.connections == 2


@pytest.mark.parametrize(
    "data", [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello", b"HTTP/1.1 200", b"\x00\xff\r\n\r\n"]
)
async def test_half_an_answer(data: bytes) -> None:
    """An answer that breaks off, or is no HTTP, is an error, at whatever point."""

    async def half(server: Server, reader: Reader, writer: Writer) -> None:
        await _request(reader)
        writer.write(data)

    async with serving(half) as (_, client):
        with pytest.raises(BrokenAnswerError):
            await _ask(client)


async def test_nobody_listens() -> None:
    """Without a server nothing was sent, and the error says so."""
    with tempfile.TemporaryDirectory() as folder, pytest.raises(ConnectFailedError, match="No such file"):
        await UnixHttp(Path(folder) / "s").send("GET", "/")


async def test_timeout() -> None:
    """A server that never answers is left after the time that was given."""

    async def never(server: Server, reader: Reader, writer: Writer) -> None:
        await reader.read()

    async with serving(never) as (server, client):
        with pytest.raises(asyncio.TimeoutError):
            await client.send("GET", "/", timeout_s=0.01)
        await eventually(lambda: server.open == 0)


async def test_cancelled_while_waiting() -> None:
    """A caller that is cancelled before the head closes its connection at once."""

    async def never(server: Server, reader: Reader, writer: Writer) -> None:
        await _request(reader)
        server.requests += 1
        await reader.read()

    async with serving(never) as (server, client):
        task = asyncio.ensure_future(_ask(client))
        await eventually(lambda: server.requests == 1)
        task.cancel()
        await eventually(lambda: server.open == 0)


async def test_a_large_body_and_a_server_that_does_not_want_it() -> None:
    """A long body arrives whole; one that is refused early ends in the refusal, and its connection too."""
    body = b"0123456789" * 400_000

    async def all_or_nothing(server: Server, reader: Reader, writer: Writer) -> None:
        server.requests += 1
        if server.requests == 1:
            assert (await _request(reader)).endswith(body)
            writer.write(HELLO)
            await reader.read()
        else:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 413 no\r\nContent-Length: 0\r\n\r\n")
            await reader.read()

    async with serving(all_or_nothing) as (server, client):
        response = await client.send("POST", "/", (), body)
        assert await response.read() == b"hello"
        response = await client.send("POST", "/", (), body, fresh=True)
        assert (response.status, await response.read()) == (413, b"")
        await eventually(lambda: server.open == 1)


async def test_a_slow_reader_does_not_gather_the_answer() -> None:
    """While nobody reads, the server is held back instead of the answer being gathered in memory."""

    async def flood(server: Server, reader: Reader, writer: Writer) -> None:
        await _request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n")
        for _ in range(1000):
            writer.write(b"x" * 100_000)
            await writer.drain()
            server.requests += 1

    async with serving(flood) as (server, client):
        response = await client.send("GET", "/")
        connection = response._connection
        assert connection is not None
        await eventually(lambda: not connection._reading)
        assert connection._size < 2_000_000
        assert server.requests < 1000
        total = 0
        while data := await response.chunk():
            total += len(data)
        assert total == 100_000_000


async def test_a_full_backlog_is_waited_for() -> None:
    """A server whose queue of connections is full for a moment is asked again, and nothing is lost."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(0)
        first = socket.socket(socket.AF_UNIX)
        first.connect(str(path))
        client = UnixHttp(path)
        asking = asyncio.ensure_future(_ask(client))
        await asyncio.sleep(0)
        assert not asking.done()
        server = Server(path, answer)
        serving_all = await asyncio.start_unix_server(server.handle, sock=listener)
        assert await asking == b"hello"
        first.close()
        client.close()
        await eventually(lambda: server.open == 0)
        serving_all.close()


@pytest.mark.parametrize("target", ["/a b", "/a\r\nX: y", "/\n"])
async def test_a_target_that_would_be_two(target: str) -> None:
    """A target or header with a line break never reaches the socket."""
    async with serving(answer) as (server, client):
        with pytest.raises(ValueError, match="line break"):
            await client.send("GET", target)
        with pytest.raises(ValueError, match="line break"):
            await client.send("GET", "/", [("X", "a\r\nY: b")])
        assert server.connections == 0
