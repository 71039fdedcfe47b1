"""One event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from moe_proxy.errors import UsageError
from moe_proxy.loop_thread import LoopThread


@pytest.fixture
def loop() -> LoopThread:
    """A loop."""
    return LoopThread("test-loop")


async def _number() -> int:
    await asyncio.sleep(0)
    return 7


async def _fails() -> None:
    raise ValueError("it is wrong")


def test_results_and_errors_come_back(loop: LoopThread) -> None:
    """What the work gives or raises is what the caller gets; at the end there is no thread."""
    assert loop.run(_number()) == 7
    with pytest.raises(ValueError, match="it is wrong"):
        loop.run(_fails())
    loop.close()
    loop.close()
    assert "test-loop" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(UsageError):
        loop.run(_number())


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_cancels_the_work_and_waits_for_its_end(loop: LoopThread) -> None:
    """Every resource is closed also on KeyboardInterrupt: the work was cancelled and cleaned up."""
    ended: list[str] = []

    async def works() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        loop.run(works())
    assert ended == ["cleaned up"]
    assert loop.run(_number()) == 7
    loop.close()


def test_close_ends_what_still_runs(loop: LoopThread) -> None:
    """Every task has an owner: one that was left behind is cancelled at the end."""
    ended = threading.Event()

    async def for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def leaves_one() -> asyncio.Task[None]:
        task = asyncio.create_task(for_ever())
        await asyncio.sleep(0)
        return task

    loop.run(leaves_one())
    loop.close()
    assert ended.is_set()


def test_the_loop_cannot_wait_for_itself(loop: LoopThread) -> None:
    """A call from the loop's own thread would wait for ever; it is refused instead."""

    async def asks_itself() -> None:
        loop.run(_number())

    with pytest.raises(UsageError, match="AsyncHybridMoERuntime"):
        loop.run(asks_itself())
    loop.close()
