"""Owns the proxy under measurement: the whole product in front of the stand-in for llama-server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from client import Timed


@dataclass(frozen=True)
class Proxy:
    """The running proxy and the backend behind it."""

    process: psutil.Process
    address: tuple[str, int]
    socket: Path

    def cpu_s(self) -> float:
        """CPU time spent by the proxy so far."""
        times = self.process.cpu_times()
        return times.user + times.system

    def resident_mb(self) -> float:
        """Resident memory in MB."""
        return self.process.memory_info().rss / 1e6


@contextmanager
def running() -> Iterator[Proxy]:
    """The proxy on a CPU of its own; this program and the backend share the others."""
    cpus = sorted(os.sched_getaffinity(0))
    own, others = {cpus[0]}, set(cpus[1:]) or {cpus[0]}
    os.sched_setaffinity(0, others)
    with tempfile.TemporaryDirectory(prefix="bench") as name:
        folder = Path(name)
        engine = folder / "llama-server"
        backend = Path(__file__).parent / "backend.py"
        engine.write_text(f'#!/bin/sh\nexec {sys.executable} {backend} "$@"\n', encoding="utf-8")
        engine.chmod(0o755)
        env = os.environ | {
            "MOE_PROXY_STATE_DIR": str(folder / "state"),
            "MOE_PROXY_RUNTIME_DIR": str(folder / "run"),
            "MOE_PROXY_MAX_IN_FLIGHT": "512",
            "BENCH_CPUS": ",".join(map(str, sorted(others))),
            "MOE_PROXY_CONFIG": os.devnull,
        }
        port = _free_port()
        argv = [sys.executable, "-m", "moe_proxy", "start", "--port", str(port), "--alias", "bench"]
        argv += ["--engine", str(engine), "--model", "planted-moe"]
        with (folder / "log").open("wb") as log:
            child = subprocess.Popen(
                argv, env=env, stdout=log, stderr=log, preexec_fn=lambda: os.sched_setaffinity(0, own)
            )
        try:
            proxy = Proxy(
                psutil.Process(child.pid), ("127.0.0.1", port), folder / "run" / str(port) / "engine.sock"
            )
            _wait_ready(proxy, child, folder / "log")
            yield proxy
        finally:
            child.terminate()
            child.wait(60)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_ready(proxy: Proxy, child: subprocess.Popen[bytes], log: Path) -> None:
    give_up_s = time.monotonic() + 60
    while time.monotonic() < give_up_s:
        if child.poll() is not None:
            raise SystemExit(log.read_text(errors="replace"))
        try:
            ask = Timed(proxy.address)
            ask.ask(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            ask.close()
            return
        except (OSError, RuntimeError):
            time.sleep(0.05)
    raise SystemExit("the proxy did not become ready")
