"""Live readings: taken while somebody watches, kept within bounds, and nobody waits for a slow watcher."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from moe_proxy.errors import BusyError, NotRunningError
from moe_proxy.proxy.watching import Update, Watcher, Watching
from tests.support.surface import eventually


class World:
    """What is read, and when: a reading is due once the test says so."""

    def __init__(self, **limits: int) -> None:
        self.reads = 0
        self.error: Exception | None = None
        self.placement: dict[str, object] | None = {"resident": {"0": "0"}}
        self.failures: list[Exception] = []
        self.due = asyncio.Semaphore(0)
        self.pauses = 0
        self.watching = Watching(
            self.stats,
            self.placed,
            monotonic_s=lambda: float(self.reads),
            wall_ns=lambda: self.reads * 10**6,
            beside=self.beside,
            pause=self.pause,
            **limits,
        )

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Note what is raised."""
        try:
            yield
        except Exception as error:
            self.failures.append(error)

    async def stats(self) -> dict[str, Any]:
        """One more request in each reading; or an error."""
        self.reads += 1
        if self.error is not None:
            raise self.error
        requests = {"total": self.reads, "domains": {}}
        return {"uptime_s": self.reads, "requests": requests, "experts": None}

    async def placed(self) -> dict[str, object] | None:
        """Where the test put them."""
        return self.placement

    async def pause(self) -> None:
        """Until the test wants another one."""
        self.pauses += 1
        await self.due.acquire()

    async def read(self, count: int = 1) -> None:
        """Have ``count`` readings taken, failed ones too, and wait for the last."""
        for _ in range(count):
            pauses = self.pauses
            self.due.release()
            await eventually(lambda pauses=pauses: self.pauses > pauses)


@asynccontextmanager
async def world(**limits: int) -> AsyncIterator[World]:
    """A world whose task is gone at the end."""
    made = World(**limits)
    try:
        yield made
    finally:
        await made.watching.close()


async def update(watcher: Watcher) -> Update:
    """The next update, which must come."""
    found = await asyncio.wait_for(watcher.update(), 5)
    assert found is not None
    return found


def numbers(found: Update) -> list[int]:
    """Which readings the points are of."""
    return [point.time_ms for point in found.points]


async def test_nothing_is_read_while_nobody_watches() -> None:
    """The engine is asked only while somebody watches, and again when somebody comes back."""
    async with world() as seen:
        assert seen.reads == 0
        with seen.watching.watched() as watcher:
            assert numbers(await update(watcher)) == [1]
        seen.due.release()
        await eventually(lambda: "watching" not in {task.get_name() for task in asyncio.all_tasks()})
        assert seen.reads == 1
        with seen.watching.watched() as watcher:
            later = await update(watcher)
            assert numbers(later) == [1, 2]
            # Nothing is known of the time between: no line leads there, and no rate is made of it.
            assert [(point.first, point.rates.requests_per_s) for point in later.points] == [(True, None)] * 2


async def test_rates_are_of_neighbours() -> None:
    """Each point has the rates since the one before."""
    async with world() as seen:
        with seen.watching.watched() as watcher:
            await update(watcher)
            await seen.read()
            (point,) = (await update(watcher)).points
            assert (point.first, point.rates.requests_per_s) == (False, 1.0)


async def test_a_slow_watcher_holds_up_nobody() -> None:
    """One that takes its time gets all that is kept at once; the others have had theirs."""
    async with world(history=3) as seen:
        with seen.watching.watched() as slow, seen.watching.watched() as quick:
            await update(slow)
            await update(quick)
            for number in range(2, 8):
                await seen.read()
                assert numbers(await update(quick)) == [number]
            assert numbers(await update(slow)) == [5, 6, 7]


async def test_memory_is_bounded() -> None:
    """The history holds so many points, however long somebody watches; only so many may."""
    async with world(history=4, max_watchers=2) as seen:
        with seen.watching.watched() as first, seen.watching.watched():
            await update(first)
            await seen.read(10)
            assert len(seen.watching.since(0)) == 4
            with pytest.raises(BusyError, match="2 watch already"), seen.watching.watched():
                pass
        with seen.watching.watched():
            pass


async def test_a_placement_is_sent_when_it_moved() -> None:
    """The largest part goes out with the first update, and then only when an expert has moved."""
    async with world() as seen:
        with seen.watching.watched() as watcher:
            found = await update(watcher)
            assert (found.placed, found.placement) == (True, {"resident": {"0": "0"}})
            await seen.read()
            assert not (await update(watcher)).placed
            seen.placement = None
            await seen.read()
            found = await update(watcher)
            assert (found.placed, found.placement) == (True, None)


async def test_a_reading_that_fails_is_a_gap() -> None:
    """What goes wrong is counted and ends nothing; the next point starts anew."""
    async with world() as seen:
        with seen.watching.watched() as watcher:
            await update(watcher)
            seen.error = RuntimeError("on demand")
            await seen.read()
            assert [str(error) for error in seen.failures] == ["on demand"]
            seen.error = None
            await seen.read()
            (point,) = (await update(watcher)).points
            assert (point.time_ms, point.first) == (3, True)


async def test_a_watcher_that_is_cancelled_leaves_nothing() -> None:
    """A browser that goes away is a cancelled handler: its place is free, and the reading ends."""
    async with world(max_watchers=1) as seen:

        async def watch() -> None:
            with seen.watching.watched() as watcher:
                while await watcher.update():
                    pass

        task = asyncio.create_task(watch())
        await eventually(lambda: seen.pauses == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert seen.watching.watchers == 0
        seen.due.release()
        await eventually(lambda: "watching" not in {task.get_name() for task in asyncio.all_tasks()})


async def test_closing_ends_every_view() -> None:
    """At shutdown those that watch get no more, and nobody new is let in."""
    async with world() as seen:
        with seen.watching.watched() as watcher:
            await update(watcher)
            waiting = asyncio.create_task(watcher.update())
            await asyncio.sleep(0)
            await seen.watching.close()
            assert await asyncio.wait_for(waiting, 5) is None
        with pytest.raises(NotRunningError), seen.watching.watched():
            pass
