"""Owns a bare llama-server process for tests and measurements, without the proxy in front."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.proxy_process import wait_until
from tests.support.text import UnixConnection


def _healthy(socket: Path) -> bool:
    connection = UnixConnection(socket)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@contextmanager
def engine_process(server: Path, model: Path, *flags: str, **env: str) -> Iterator[Path]:
    """Run ``server`` on a Unix socket; the socket's path. ``env`` is added to the environment."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("wb") as log:
        socket = Path(folder) / "e.sock"
        argv = [str(server), "--host", str(socket), "--model", str(model), "--ctx-size", "2048"]
        argv += ["--parallel", "2", "--threads", "2", *flags]
        process = subprocess.Popen(
            argv, env=os.environ | env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:

            def ready() -> bool:
                assert process.poll() is None, (Path(folder) / "log").read_text(errors="replace")[-2000:]
                return _healthy(socket)

            wait_until(ready, "llama-server is ready", 60)
            yield socket
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
