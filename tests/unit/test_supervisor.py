"""The supervisor: its states, its restarts, its end, and that nothing of the child is ever left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from moe_proxy.engine.leftover import read_record
from moe_proxy.engine.process import start_time_of
from moe_proxy.engine.supervisor import State, Supervisor
from moe_proxy.errors import EngineGoneError, EngineStartError
from tests.support.fake_engine import FAKE, LIMITS, PATIENCE_S, gone, launch, supervisor, until


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A runtime folder whose path leaves room for a socket name."""
    return tmp_path_factory.mktemp("run")


async def test_starts_serves_and_stops_without_a_trace(folder: Path) -> None:
    """States go from starting to ready to stopped; afterwards there is no process, socket or record."""
    async with supervisor(folder) as engine:
        assert engine.status.state is State.STARTING
        await engine.ready(PATIENCE_S)
        status = engine.status
        assert (status.state, status.restarts, status.reason) == (State.READY, 0, "")
        pid = status.pid
        assert pid is not None
        record = read_record(folder / "engine.json")
        assert record is not None
        assert (record.pid, record.start_time) == (pid, start_time_of(pid))
        assert (folder / "engine.sock").stat().st_mode & 0o077 == 0
        assert os.getpgid(pid) == pid
    assert engine.status.state is State.STOPPED
    assert gone(pid)
    assert not (folder / "engine.sock").exists()
    assert not (folder / "engine.json").exists()


async def test_loading_is_a_state_of_its_own(folder: Path) -> None:
    """A child that answers 503 is loading; ``ready`` gives up after its own timeout and says so."""
    async with supervisor(folder, "--never-ready") as engine:
        await until(lambda: engine.status.state is State.LOADING)
        with pytest.raises(EngineStartError, match=r"not ready after 0\.05 s, it is loading"):
            await engine.ready(0.05)


@pytest.mark.parametrize(("model_bytes", "least", "most"), [(1, 1.0, 1.0), (2 << 30, 0.001, 0.2)])
async def test_progress_of_loading(folder: Path, model_bytes: int, least: float, most: float) -> None:
    """Loading with progress: how much of the model is in the child's memory, while it loads."""
    async with supervisor(folder, "--never-ready", model_bytes=model_bytes) as engine:
        await until(lambda: engine.status.state is State.LOADING)
        progress = engine.status.progress
        assert progress is not None
        assert least <= progress <= most
    async with supervisor(folder, model_bytes=model_bytes) as engine:
        await engine.ready(PATIENCE_S)
        assert engine.status.progress is None


async def test_a_child_that_never_becomes_ready_is_ended(folder: Path) -> None:
    """Not ready within ``ready_timeout``: ended, failed, and every waiter gets the reason."""
    limits = replace(LIMITS, ready_timeout_s=0.3)
    async with supervisor(folder, "--never-ready", limits=limits) as engine:
        await until(lambda: engine.status.pid is not None)
        pid = engine.status.pid
        waits = [engine.ready(PATIENCE_S) for _ in range(2)]
        results = await asyncio.gather(*waits, return_exceptions=True)
        assert [type(result) for result in results] == [EngineStartError, EngineStartError]
        assert results[0] is not results[1]
        assert "not ready within 0.3 s" in str(results[0])
        assert engine.status.state is State.FAILED
        assert pid is not None
        assert gone(pid)


async def test_a_first_start_that_fails_is_final_and_shows_the_last_lines(folder: Path) -> None:
    """Bad arguments or a bad model: failed at once, with the child's own words, and no restart loop."""
    starts = folder / "starts"
    async with supervisor(folder, "--exit-at-start", "7", "--starts-file", str(starts)) as engine:
        with pytest.raises(EngineStartError) as caught:
            await engine.ready(PATIENCE_S)
        assert "exited with code 7 while loading" in str(caught.value)
        assert "the fake exits on demand" in str(caught.value)
        with pytest.raises(EngineStartError):
            await engine.ready(PATIENCE_S)
    assert len(starts.read_text().splitlines()) == 1
    assert engine.status.state is State.FAILED


async def test_a_program_that_is_not_there_fails_with_its_name(folder: Path) -> None:
    """A missing llama-server is one clear reason."""
    broken = replace(launch(folder), argv=(str(folder / "no-server"), "--host", "x"))
    async with Supervisor(
        broken, runtime_dir=folder, log_path=folder / "engine.log", limits=LIMITS
    ) as engine:
        with pytest.raises(EngineStartError, match=r"cannot run .*no-server: No such file"):
            await engine.ready(PATIENCE_S)


async def test_a_crash_is_seen_and_restarted(folder: Path) -> None:
    """kill -9 of the child: crashed with the reason, then ready again; on_ready runs after each start."""
    calls: list[int] = []

    async def on_ready() -> None:
        calls.append(1)

    async with supervisor(folder, on_ready=on_ready) as engine:
        await engine.ready(PATIENCE_S)
        first = engine.status.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: engine.status.state is not State.READY)
        await engine.ready(PATIENCE_S)
        assert engine.status.restarts == 1
        assert engine.status.pid != first
        await until(lambda: len(calls) == 2)


async def test_waiters_wait_out_a_crash_up_to_their_timeout(folder: Path) -> None:
    """``ready`` during crashed waits for the restart; one with less time gets the reason."""
    limits = replace(LIMITS, backoff_first_s=600.0, backoff_max_s=600.0)
    async with supervisor(folder, limits=limits) as engine:
        await engine.ready(PATIENCE_S)
        assert engine.status.pid is not None
        os.kill(engine.status.pid, signal.SIGKILL)
        await until(lambda: engine.status.state is State.CRASHED)
        status = engine.status
        assert "was killed by SIGKILL" in status.reason
        assert status.next_try_s is not None
        assert 0 < status.next_try_s <= 600
        assert status.pid is None
        with pytest.raises(EngineStartError, match="it is crashed: llama-server was killed by SIGKILL"):
            await engine.ready(0.05)
    assert engine.status.state is State.STOPPED


async def test_starts_that_fail_during_back_off_are_tried_again(folder: Path) -> None:
    """After it has been ready once, failing starts go on backing off: 1, 2, 4 … up to the limit."""
    starts, waits = folder / "starts", []
    switches = ("--starts-file", str(starts), "--fail-from-start", "2")
    async with supervisor(folder, *switches) as engine:
        await engine.ready(PATIENCE_S)
        assert engine.status.pid is not None
        os.kill(engine.status.pid, signal.SIGKILL)

        def note() -> bool:
            status = engine.status
            if status.state is State.CRASHED and status.restarts == len(waits):
                waits.append(engine._next_try - engine._since)
            return len(waits) == 5

        deadline = time.monotonic() + PATIENCE_S
        while not note():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.001)
        assert [round(wait, 2) for wait in waits] == [0.02, 0.04, 0.08, 0.08, 0.08]
        assert "exited with code 3 while loading" in engine.status.reason


async def test_ten_thousand_lines_do_not_stop_the_child(folder: Path) -> None:
    """A 10,000-line log is drained while the child starts: the file holds it, the ring its end."""
    async with supervisor(folder, "--log-lines", "10000", "--log-line-bytes", "200") as engine:
        await engine.ready(PATIENCE_S)
        tail = engine.tail(200)
        assert len(tail) == 200
        assert any(line.startswith("line 9999 ") for line in tail)
    written = (folder / "engine.log").read_text().splitlines()
    assert sum(line.startswith("line ") for line in written) == 10_000


async def test_a_child_that_ignores_sigterm_is_killed_with_its_group(folder: Path) -> None:
    """stop: TERM, wait, KILL of the whole group, also of what the child itself has started."""
    limits = replace(LIMITS, term_grace_s=0.2)
    async with supervisor(folder, "--ignore-sigterm", "--grandchild", limits=limits) as engine:
        await engine.ready(PATIENCE_S)
        pid = engine.status.pid
        [line] = [line for line in engine.tail(200) if line.startswith("grandchild ")]
        grandchild = int(line.split()[1])
        assert not gone(grandchild)
    assert pid is not None
    assert gone(pid)
    await until(lambda: gone(grandchild))
    assert any("SIGTERM ignored" in line for line in engine.tail(200))


async def test_a_second_stop_hurries_the_first(folder: Path) -> None:
    """A second SIGTERM means now: stop(0) does not wait for the grace of the stop under way."""
    limits = replace(LIMITS, term_grace_s=600.0)
    async with supervisor(folder, "--ignore-sigterm", limits=limits) as engine:
        await engine.ready(PATIENCE_S)
        pid = engine.status.pid
        slow = asyncio.create_task(engine.stop())
        await until(lambda: engine.status.state is State.DRAINING)
        await asyncio.wait_for(engine.stop(0), PATIENCE_S)
        await slow
    assert pid is not None
    assert gone(pid)


async def test_stop_while_loading(folder: Path) -> None:
    """stop ends a child that is still loading; waiters learn that it was stopped."""
    async with supervisor(folder, "--never-ready") as engine:
        await until(lambda: engine.status.state is State.LOADING)
        pid = engine.status.pid
        waiter = asyncio.create_task(engine.ready(PATIENCE_S))
        await asyncio.sleep(0)
        await engine.stop()
        with pytest.raises(EngineGoneError, match=r"llama-server is (draining|stopped)"):
            await waiter
    assert pid is not None
    assert gone(pid)


@pytest.mark.parametrize("switch", ["--never-ready", "--never-listen", "--ready-after=0"])
async def test_cancelling_the_owner_leaves_no_child(folder: Path, switch: str) -> None:
    """Cancellation at any await, also of a child that ignores SIGTERM, leaves no process."""
    async with supervisor(folder, "--ignore-sigterm", switch) as engine:
        await until(lambda: engine.status.pid is not None)
        if switch == "--ready-after=0":
            await engine.ready(PATIENCE_S)
        pid = engine.status.pid
        assert engine._owner is not None
        engine._owner.cancel()
        await asyncio.wait({engine._owner}, timeout=PATIENCE_S)
        assert pid is not None
        assert gone(pid)


async def test_a_failing_on_ready_does_not_harm(folder: Path) -> None:
    """on_ready may fail or hang: the engine is ready, and a crash is still seen."""

    async def hang() -> None:
        await asyncio.Event().wait()

    async with supervisor(folder, on_ready=hang) as engine:
        await engine.ready(PATIENCE_S)
        assert engine.status.pid is not None
        os.kill(engine.status.pid, signal.SIGKILL)
        await until(lambda: engine.status.restarts == 1)
        await engine.ready(PATIENCE_S)


PARENT = """
import asyncio, os, sys
from pathlib import Path
from moe_proxy.engine.supervisor import Launch, Supervisor

async def main(folder):
    path = folder / "engine.sock"
    argv = (sys.executable, sys.argv[2], "--host", str(path), "--ignore-sigterm")
    launch = Launch(argv, dict(os.environ), path)
    async with Supervisor(launch, runtime_dir=folder, log_path=folder / "engine.log") as engine:
        await engine.ready(60)
        print(engine.status.pid, flush=True)
        await asyncio.sleep(600)

asyncio.run(main(Path(sys.argv[1])))
"""


def test_kill_9_of_the_parent_takes_the_child_along(folder: Path) -> None:
    """kill -9 of the proxy: llama-server is gone within 2 s."""
    argv = [sys.executable, "-c", textwrap.dedent(PARENT), str(folder), str(FAKE)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not gone(pid)
        parent.kill()
        killed_at = time.monotonic()
        while not gone(pid):
            assert time.monotonic() - killed_at < 2.0
            time.sleep(0.01)
    assert json.loads((folder / "engine.json").read_text())["pid"] == pid


async def test_rest_and_wake(folder: Path) -> None:
    """``rest`` ends the child and frees its memory; ``ready`` starts another, and no crash is counted."""
    starts = folder / "starts"
    async with supervisor(folder, "--starts-file", str(starts)) as engine:
        await engine.ready(PATIENCE_S)
        first = engine.status.pid
        assert first is not None
        engine.rest()
        assert engine.status.state is State.DRAINING
        await until(lambda: engine.status.state is State.ASLEEP)
        assert gone(first)
        assert engine.status.pid is None
        await asyncio.gather(*(engine.ready(PATIENCE_S) for _ in range(3)))
        assert (engine.status.state, engine.status.restarts) == (State.READY, 0)
        assert len(starts.read_text().splitlines()) == 2


async def test_wanted_while_it_goes_to_rest(folder: Path) -> None:
    """Whoever asks while the child is being ended gets the next one, and never the one that ends."""
    async with supervisor(folder) as engine:
        await engine.ready(PATIENCE_S)
        first = engine.status.pid
        engine.rest()
        await engine.ready(PATIENCE_S)
        assert engine.status.state is State.READY
        assert engine.status.pid not in (None, first)


async def test_rest_before_it_is_ready_and_stop_while_at_rest(folder: Path) -> None:
    """A child that loads is not disturbed; one at rest can be stopped, and whoever waits hears of it."""
    async with supervisor(folder) as engine:
        engine.rest()
        await engine.ready(PATIENCE_S)
        engine.rest()
        await until(lambda: engine.status.state is State.ASLEEP)
        await engine.stop()
        assert engine.status.state is State.STOPPED
        with pytest.raises(EngineGoneError):
            await engine.ready(PATIENCE_S)
