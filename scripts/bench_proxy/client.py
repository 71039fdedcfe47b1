"""Owns the load: a blocking client that times one request after the other, and many connections at once."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PROMPTS = (
    "Write a Python function that parses an ISO date and returns the day of the week.",
    "Tell me a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Solve for x: 3x + 7 = 22, and explain each step so that a pupil can follow.",
    "What are the side effects of ibuprofen, and when should a doctor be asked?",
    "Translate the following sentence into French: the train leaves at noon.",
    "Summarise the causes of the First World War in five sentences.",
)
Address = Path | tuple[str, int]


@dataclass(frozen=True)
class Ask:
    """One kind of request. ``seed`` 1 has the backend pace the chunks."""

    path: str
    stream: bool
    tokens: int = 16
    seed: int = 0

    def requests(self) -> Iterator[bytes]:
        """The bytes of one request after the other, with changing prompts."""
        for prompt in itertools.cycle(PROMPTS):
            body: dict[str, object] = {
                "model": "bench",
                "messages": [{"role": "user", "content": prompt}],
                "stream": self.stream,
            }
            if self.path.startswith("/api/"):
                body["options"] = {"num_predict": self.tokens, "seed": self.seed}
            else:
                body |= {"max_tokens": self.tokens, "seed": self.seed}
            data = json.dumps(body).encode()
            head = f"POST {self.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            yield f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


class Timed:
    """One blocking connection, made anew when the other side closes it."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._socket: socket.socket | None = None

    def ask(self, request: bytes, *, any_status: bool = False) -> tuple[float, float]:
        """Seconds to the first byte of the body's content, and to its end, which is to be a 200."""
        if self._socket is None:
            self._socket = _connected(self._address)
        began = time.perf_counter()
        self._socket.sendall(request)
        reader = Answer()
        first = 0.0
        while not reader.complete:
            data = self._socket.recv(262144)
            if not data:
                raise ConnectionError("the answer broke off")
            reader.feed(data)
            if reader.content and not first:
                first = time.perf_counter() - began
        took = time.perf_counter() - began
        if reader.closes:
            self.close()
        if reader.status != 200 and not any_status:
            raise RuntimeError(f"status {reader.status}")
        return first, took

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class Answer:
    """An HTTP answer as it comes; ``body`` is kept on demand."""

    def __init__(self, *, keep: bool = False) -> None:
        self.status = 0
        self.content = self.complete = self.closes = False
        self.body = bytearray()
        self._keep = keep
        self._head = b""
        self._left = -1
        self._tail = b""

    def feed(self, data: bytes) -> None:
        """More bytes."""
        if not self.status:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head, data = self._head[:end].lower(), self._head[end + 4 :]
            self.status = int(head[9:12])
            self.closes = b"\r\nconnection: close" in head
            length = re.search(rb"\r\ncontent-length: *(\d+)", head)
            self._left = int(length[1]) if length else -1
        if not data:
            return
        self.content = True
        if self._keep:
            self.body += data
        if self._left >= 0:
            self._left -= len(data)
            self.complete = self._left <= 0
        else:
            self._tail = (self._tail + data)[-7:]
            self.complete = self._tail.endswith(b"\r\n0\r\n\r\n")

    def unchunked(self) -> bytes:
        """The kept body without its framing."""
        data, parts, at = bytes(self.body), [], 0
        while True:
            end = data.index(b"\r\n", at)
            size = int(data[at:end], 16)
            if not size:
                return b"".join(parts)
            parts.append(data[end + 2 : end + 2 + size])
            at = end + 4 + size


class Busy(asyncio.Protocol):
    """One of many connections; asks anew as soon as it was answered, while ``more`` says so."""

    def __init__(self, requests: Iterator[bytes], more: Callable[[], bool], keep: bool) -> None:
        self._requests = requests
        self._more = more
        self._keep = keep
        self.kept: list[Answer] = []
        self.answered = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._next()

    def data_received(self, data: bytes) -> None:
        self._answer.feed(data)
        if not self._answer.complete:
            return
        if self._answer.status != 200:
            self._end(RuntimeError(f"status {self._answer.status}"))
            return
        self.answered += 1
        if self._keep:
            self.kept.append(self._answer)
        self._next()

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error or ConnectionError("closed early"))

    def _next(self) -> None:
        if not self._more():
            self._end(None)
            return
        self._answer = Answer(keep=self._keep)
        assert isinstance(self._transport, asyncio.Transport)
        self._transport.write(next(self._requests))

    def _end(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None) if error is None else self.ended.set_exception(error)
            self._transport.close()


async def busy(
    address: tuple[str, int], asks: list[Ask], connections: int, total: int, *, keep: bool = False
) -> list[Busy]:
    """``total`` requests over so many connections at once, the kinds in turn."""
    left = itertools.count(total, -1)
    loop = asyncio.get_running_loop()
    made = []
    for number in range(connections):
        requests = asks[number % len(asks)].requests()
        _, protocol = await loop.create_connection(
            lambda requests=requests: Busy(requests, lambda: next(left) > 0, keep), *address
        )
        made.append(protocol)
    await asyncio.gather(*(protocol.ended for protocol in made))
    return made


def _connected(address: Address) -> socket.socket:
    if isinstance(address, Path):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(address))
        return connection
    connection = socket.create_connection(address)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
