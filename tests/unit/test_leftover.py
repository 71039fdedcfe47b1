"""What an earlier run left behind: its socket and its child, told apart from what belongs to others."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_proxy.engine.leftover import EngineRecord
from moe_proxy.engine.process import start_time_of
from moe_proxy.errors import EngineStartError
from tests.support.fake_engine import PATIENCE_S, supervisor


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A runtime folder whose path leaves room for a socket name."""
    return tmp_path_factory.mktemp("run")


def sleeper() -> subprocess.Popen[bytes]:
    """A process that does nothing, leader of its group."""
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)


async def test_a_stale_socket_is_removed(folder: Path) -> None:
    """A socket file that a dead process left does not stop the next start."""
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(folder / "engine.sock"))
    async with supervisor(folder) as engine:
        await engine.ready(PATIENCE_S)


async def test_a_socket_in_use_is_refused(folder: Path) -> None:
    """Another live process on the socket: a clear error, and it keeps its socket."""
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(folder / "engine.sock"))
        other.listen()
        async with supervisor(folder) as engine:
            with pytest.raises(EngineStartError, match="another process listens on"):
                await engine.ready(PATIENCE_S)
    assert (folder / "engine.sock").is_socket()


async def test_a_leftover_is_recognised_and_ended(folder: Path) -> None:
    """A child of an earlier run, named by pid and start time, is ended before the next start."""
    leftover = sleeper()
    try:
        EngineRecord(leftover.pid, start_time_of(leftover.pid), 1 << 30, 1).write(folder / "engine.json")
        async with supervisor(folder) as engine:
            await engine.ready(PATIENCE_S)
            assert leftover.wait(0) == -signal.SIGTERM
    finally:
        leftover.kill()
        leftover.wait()


async def test_a_recycled_pid_is_left_alone(folder: Path) -> None:
    """A record whose pid now belongs to another process (another start time) ends nothing."""
    stranger = sleeper()
    try:
        start_time = start_time_of(stranger.pid)
        assert start_time is not None
        EngineRecord(stranger.pid, start_time - 1, 1 << 30, 1).write(folder / "engine.json")
        async with supervisor(folder) as engine:
            await engine.ready(PATIENCE_S)
            assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


async def test_the_engine_of_a_living_proxy_is_left_alone(folder: Path) -> None:
    """A child whose own supervisor still lives is no leftover: the start is refused."""
    child, owner = sleeper(), sleeper()
    try:
        EngineRecord(child.pid, start_time_of(child.pid), owner.pid, start_time_of(owner.pid)).write(
            folder / "engine.json"
        )
        async with supervisor(folder) as engine:
            with pytest.raises(EngineStartError, match=f"another moe-proxy .pid {owner.pid}"):
                await engine.ready(PATIENCE_S)
        assert child.poll() is None
    finally:
        for process in (child, owner):
            process.kill()
            process.wait()
