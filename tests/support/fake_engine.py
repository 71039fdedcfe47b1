"""Owns a supervised fake llama-server in tests: how it is started, and whether anything of it is left."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from moe_proxy.engine.process import start_time_of
from moe_proxy.engine.supervisor import Launch, Supervisor, SupervisorLimits

FAKE = Path(__file__).parents[1] / "fakes" / "fake_llama_server.py"
PATIENCE_S = 20.0
LIMITS = SupervisorLimits(
    ready_timeout_s=PATIENCE_S,
    health_interval_s=0.02,
    term_grace_s=5.0,
    backoff_first_s=0.02,
    backoff_max_s=0.08,
    backoff_reset_s=60.0,
)


def launch(folder: Path, *switches: str) -> Launch:
    """The fake, started as llama-server is."""
    path = folder / "engine.sock"
    argv = (sys.executable, str(FAKE), "--host", str(path), "--model", "m.gguf", *switches)
    return Launch(argv=argv, env=dict(os.environ), socket=path)


def supervisor(
    folder: Path,
    *switches: str,
    limits: SupervisorLimits = LIMITS,
    on_ready: Callable[[], Awaitable[None]] | None = None,
    model_bytes: int = 0,
) -> Supervisor:
    """A supervisor of the fake."""
    return Supervisor(
        launch(folder, *switches),
        runtime_dir=folder,
        log_path=folder / "engine.log",
        limits=limits,
        on_ready=on_ready,
        model_bytes=model_bytes,
    )


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that must come; the bound only turns a hang into a failure."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    """No process of that pid, or a zombie."""
    return start_time_of(pid) is None
