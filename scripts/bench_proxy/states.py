"""Owns what is measured of states and breaks: information routes, clients that go, engines that die."""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

from client import Answer, Ask, Timed
from proxy import Proxy

_MODEL = json.dumps({"model": "bench"}).encode()
_INFORMATION = (
    *(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
      for path in ("/", "/health", "/api/version", "/api/tags", "/api/ps")),
    b"POST /api/show HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(_MODEL), _MODEL),
)  # fmt: skip
_UNLOAD = json.dumps({"model": "bench", "keep_alive": 0}).encode()
_PATIENCE_S = 30.0


def asked(address: Any, request: bytes) -> tuple[int, Any]:
    """Status and JSON of one answer, on a connection of its own."""
    kind = socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX
    with socket.socket(kind) as connection:
        connection.connect(address if isinstance(address, tuple) else str(address))
        connection.sendall(request)
        answer = Answer(keep=True)
        while not answer.complete:
            data = connection.recv(65536)
            if not data:
                raise ConnectionError("the answer broke off")
            answer.feed(data)
    return answer.status, json.loads(answer.body)


def get(address: Any, path: str) -> Any:
    """The JSON behind ``path``."""
    status, value = asked(address, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    if status != 200:
        raise SystemExit(f"{path} answered {status}: {value}")
    return value


def state(proxy: Proxy) -> str:
    """The engine's, as /health tells it."""
    return str(asked(proxy.address, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")[1]["state"])


def until(proxy: Proxy, wanted: Callable[[str], bool]) -> float:
    """Seconds until the state is ``wanted``."""
    began = time.monotonic()
    while not wanted(state(proxy)):
        if time.monotonic() > began + _PATIENCE_S:
            raise SystemExit(f"the engine is {state(proxy)} and stays so")
        time.sleep(0.001)
    return time.monotonic() - began


def disconnects(proxy: Proxy, path: str, count: int) -> dict[str, Any]:
    """Milliseconds from a client's close, before the first byte, to its end at the engine."""
    took = []
    request = next(Ask(path, True, seed=2).requests())
    for _ in range(count):
        client = socket.create_connection(proxy.address)
        client.sendall(request)
        _until_active(proxy, 1)
        before = get(proxy.socket, "/bench/left")["left_s"]
        closed = time.monotonic()
        client.close()
        while (left := get(proxy.socket, "/bench/left")["left_s"]) == before:
            if time.monotonic() > closed + _PATIENCE_S:
                raise SystemExit("the engine never heard that a client had gone")
            time.sleep(0.001)
        took.append((left - closed) * 1e3)
        _until_active(proxy, 0)
    spread = [round(x, 3) for x in (statistics.median(took), min(took), max(took))]
    return {"count": count, "ms": spread}


def _until_active(proxy: Proxy, count: int) -> None:
    while get(proxy.address, "/stats")["requests"]["active"] != count:
        time.sleep(0.001)


def information(proxy: Proxy, count: int) -> list[float]:
    """Milliseconds of the slowest information route: p99, p50 and the slowest answer of all."""
    marks = []
    for request in _INFORMATION:
        timed = Timed(proxy.address)
        samples = sorted(timed.ask(request, any_status=True)[1] * 1e3 for _ in range(count))
        timed.close()
        marks.append((samples[int(0.99 * count)], samples[count // 2], samples[-1]))
    slowest = max(marks)
    return [
        round(slowest[0], 3),
        round(min(mark[1] for mark in marks), 3),
        round(max(mark[2] for mark in marks), 3),
    ]


def states(proxy: Proxy, count: int) -> dict[str, list[float]]:
    """The information routes while the engine is ready and asleep."""
    found = {"ready": information(proxy, count)}
    body = b"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(_UNLOAD)
    asked(proxy.address, body + _UNLOAD)
    until(proxy, lambda name: name == "asleep")
    found["asleep"] = information(proxy, count)
    # The next request for the engine wakes it.
    asked(proxy.address, next(Ask("/v1/chat/completions", False).requests()))
    return found


def crashes(proxy: Proxy, kills: int, count: int) -> tuple[dict[str, Any], list[float]]:
    """Seconds until a kill -9 is seen and until all is ready again; the information routes between."""
    seen, ready, figures = [], [], []
    for _ in range(kills):
        until(proxy, lambda name: name == "ready")
        killed = time.monotonic()
        os.kill(int(get(proxy.address, "/stats")["engine"]["pid"]), signal.SIGKILL)
        seen.append(until(proxy, lambda name: name != "ready"))
        if not figures:
            figures = information(proxy, count)
        until(proxy, lambda name: name == "ready")
        ready.append(round(time.monotonic() - killed, 2))
    spread = [round(x, 4) for x in (statistics.median(seen), min(seen), max(seen))]
    return {"seen_s": spread, "ready_s": ready}, figures
