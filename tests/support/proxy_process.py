"""Owns a ``moe-proxy start`` process in tests: its start, its readiness, its end."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_START_S = 120.0


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_cli(env: dict[str, str], *args: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    argv = [sys.executable, "-m", "moe_proxy", *args]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)


def wait_until(condition: Any, what: str, timeout_s: float = 30.0) -> Any:
    """Poll until ``condition()`` is true and return its value; fail naming ``what``."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout_s:g} s: {what}")


@dataclass
class ProxyProcess:
    """One running proxy."""

    process: subprocess.Popen[bytes]
    port: int
    env: dict[str, str]
    output: Any

    @classmethod
    def start(cls, env: dict[str, str], flags: tuple[str, ...], engine_args: tuple[str, ...]) -> ProxyProcess:
        """Start on a free port."""
        port = free_port()
        argv = [sys.executable, "-m", "moe_proxy", "start", "--port", str(port), *flags]
        if engine_args:
            argv += ["--", *engine_args]
        output = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process; end() closes it
        process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        return cls(process, port, env, output)

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def socket(self) -> Path:
        """The engine's Unix socket."""
        return Path(self.env["MOE_PROXY_RUNTIME_DIR"]) / str(self.port) / "engine.sock"

    def printed(self) -> str:
        """All that it printed so far."""
        self.output.seek(0)
        return bytes(self.output.read()).decode(errors="replace")

    def get(self, path: str) -> Any:
        """GET, parsed, whatever the status."""
        try:
            with _OPENER.open(self.url + path, timeout=30) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return json.load(error)

    def post(self, path: str, body: Any, timeout_s: float = 120) -> Any:
        """POST JSON, parsed, whatever the status."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with _OPENER.open(request, timeout=timeout_s) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return json.load(error)

    def wait_ready(self) -> None:
        """Wait until /health says ok."""

        def ready() -> bool:
            assert self.process.poll() is None, f"the proxy ended: {self.printed()}"
            try:
                return bool(self.get("/health").get("status") == "ok")
            except OSError:
                return False

        wait_until(ready, "the proxy is ready", _START_S)

    def engine_pid(self) -> int:
        """Pid of llama-server."""
        return int(self.get("/stats")["engine"]["pid"])

    def settled(self) -> Any:
        """The pager's counters once the mover has nothing left to do."""

        def stats() -> Any:
            experts = self.get("/stats")["experts"]
            return experts if experts and experts["pending"] == 0 else None

        return wait_until(stats, "the mover has settled")

    def settled_requests(self) -> list[dict[str, Any]]:
        """The recent requests once none is active and the last one's counts have come in."""

        def recent() -> Any:
            body = self.get("/stats")
            return body["recent"] if body["requests"]["active"] == 0 else None

        requests: list[dict[str, Any]] = wait_until(recent, "no request is active")
        return requests

    def end(self) -> None:
        """Stop it, gently first."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.output.close()
