"""Owns a stand-in for llama-server that costs next to nothing, so that what is measured is the proxy.

Started as llama-server is: ``backend.py --host SOCKET …``. Its connections behave as cpp-httplib's: closed
after 100 requests, or 5 s without one. ``max_tokens`` of the body is how many chunks a stream has; ``seed`` 1
paces them, one at a time over all streams, so that none are read together. With ``seed`` 2 no answer comes;
``/bench/left`` tells when, by the clock that all processes share, the last who waited so has gone.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections import deque

REQUESTS_PER_CONNECTION = 100
IDLE_S = 5.0
PIECE = "token"

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_TOKENS = re.compile(rb'"(?:max_tokens|n_predict)": *(\d+)')
_STREAMS = re.compile(rb'"stream": *true')
_HANGS = re.compile(rb'"seed": *2\b')
_PACED = re.compile(rb'"seed": *1\b')
_HEAD = "HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nContent-Type: {}\r\nKeep-Alive: timeout=5, max=100\r\n"
_TIMINGS = {"cache_n": 0, "prompt_n": 8, "prompt_ms": 8.0, "predicted_n": 16, "predicted_ms": 160.0}
_USAGE = {"completion_tokens": 16, "prompt_tokens": 8, "total_tokens": 24}
_LAYERS, _EXPERTS = 6, 32
_USED = {
    "tokens": 24,
    "picks": 24 * 4 * _LAYERS,
    "hits": 24 * 4 * _LAYERS,
    "layers": {str(layer): [12] * 8 + [0] * (_EXPERTS - 8) for layer in range(_LAYERS)},
}
_CONTROL = {
    b"/health": {"status": "ok"},
    b"/experts/usage": _USED,
    b"/experts/prior": {"id": "x", "entries": 0},
}


def _chunk(delta: dict[str, object], finish: str | None, **more: object) -> bytes:
    value = {
        "choices": [{"finish_reason": finish, "index": 0, "delta": delta}],
        "created": 1700000000,
        "id": "chatcmpl-bench0123456789",
        "model": "bench",
        "system_fingerprint": "bench",
        "object": "chat.completion.chunk",
        **more,
    }
    return _framed(b"data: " + json.dumps(value).encode() + b"\n\n")


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


STREAM_HEAD = (_HEAD.format("text/event-stream") + "Transfer-Encoding: chunked\r\n").encode()
FIRST = _chunk({"role": "assistant", "content": None}, None)
MIDDLE = _chunk({"content": f" {PIECE}"}, None)
LAST = (
    _chunk({}, "stop")
    + _framed(b'data: {"choices":[],"usage":' + json.dumps(_USAGE).encode() + b',"timings":'
              + json.dumps(_TIMINGS).encode() + b"}\n\n")
    + _framed(b"data: [DONE]\n\n")
    + b"0\r\n\r\n"
)  # fmt: skip
_MESSAGE = {"role": "assistant", "content": f" {PIECE}" * 16}
WHOLE = json.dumps(
    {
        "choices": [{"finish_reason": "stop", "index": 0, "message": _MESSAGE}],
        "created": 1700000000,
        "model": "bench",
        "object": "chat.completion",
        "usage": _USAGE,
        "id": "chatcmpl-bench0123456789",
        "timings": _TIMINGS,
    }
).encode()

_left_s = [0.0]
_paced: deque[tuple[Connection, int]] = deque()


class Connection(asyncio.Protocol):
    """One connection; requests come one after the other."""

    def __init__(self) -> None:
        self._buffer = b""
        self._requests = 0
        self._hangs = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._idle: asyncio.TimerHandle | None = None
        self._flood: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._wait()

    def connection_lost(self, error: Exception | None) -> None:
        if self._hangs:
            _left_s[0] = time.monotonic()
        self._writable.set()
        if self._idle is not None:
            self._idle.cancel()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        length = _LENGTH.search(self._buffer, 0, end)
        size = end + 4 + (int(length[1]) if length else 0)
        if len(self._buffer) < size:
            return
        head, body = self._buffer[:end], self._buffer[end + 4 : size]
        self._buffer = self._buffer[size:]
        if self._idle is not None:
            self._idle.cancel()
        self._requests += 1
        self._answer(head.split(b" ", 2)[1].partition(b"?")[0], body)

    def _answer(self, path: bytes, body: bytes) -> None:
        if path in _CONTROL:
            self._whole(json.dumps(_CONTROL[path]).encode())
        elif path.startswith(b"/experts"):
            # What is not measured is not pretended: the proxy does without.
            self._whole(b'{"error":{"message":"not here"}}', _HEAD.replace("200 OK", "404 Not Found"))
        elif path == b"/bench/left":
            self._whole(json.dumps({"left_s": _left_s[0]}).encode())
        elif _HANGS.search(body):
            self._hangs = True
        elif not _STREAMS.search(body):
            self._whole(WHOLE)
        else:
            tokens = _TOKENS.search(body)
            count = int(tokens[1]) if tokens else 16
            self.transport.write(STREAM_HEAD + self._last_of_connection() + FIRST)
            if _PACED.search(body):
                _paced.append((self, count))
            else:
                self._flood = asyncio.ensure_future(self._stream(count))

    def _whole(self, body: bytes, template: str = _HEAD) -> None:
        head = template.format("application/json; charset=utf-8") + f"Content-Length: {len(body)}\r\n"
        self.transport.write(head.encode() + self._last_of_connection() + body)
        self.finished()

    def _last_of_connection(self) -> bytes:
        return b"Connection: close\r\n\r\n" if self._requests >= REQUESTS_PER_CONNECTION else b"\r\n"

    async def _stream(self, count: int) -> None:
        for _ in range(count):
            self.transport.write(MIDDLE)
            if not self._writable.is_set():
                await self._writable.wait()
        self.transport.write(LAST)
        self.finished()

    def finished(self) -> None:
        """The answer was written."""
        if self._requests >= REQUESTS_PER_CONNECTION:
            self.transport.close()
        else:
            self._wait()

    def _wait(self) -> None:
        self._idle = asyncio.get_running_loop().call_later(IDLE_S, self.transport.close)


async def _pace() -> None:
    """One chunk of one stream at a time, with a turn for the loop between."""
    while True:
        await asyncio.sleep(0.001 if not _paced else 0)
        if not _paced:
            continue
        connection, left = _paced.popleft()
        if connection.transport.is_closing():
            continue
        connection.transport.write(MIDDLE if left else LAST)
        if left:
            _paced.append((connection, left - 1))
        else:
            connection.finished()


async def _serve(path: str) -> None:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    server = await loop.create_unix_server(Connection, path, backlog=1024)
    pace = asyncio.ensure_future(_pace())
    await stopping.wait()
    pace.cancel()
    server.close()


if __name__ == "__main__":
    if "BENCH_CPUS" in os.environ:
        os.sched_setaffinity(0, {int(cpu) for cpu in os.environ["BENCH_CPUS"].split(",")})
    asyncio.run(_serve(sys.argv[sys.argv.index("--host") + 1]))
