"""Owns the readings that live views are fed with: one task takes them, and only while somebody watches.

Each watcher takes what is newer than what it has when it is ready for it: a slow one misses nothing that is
still kept, holds up nobody, and costs no memory of its own. It shapes no page and reads no request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from moe_proxy.errors import BusyError, NotRunningError
from moe_proxy.rates import Rates, Reading, rates

INTERVAL_S = 1.0
HISTORY = 600
MAX_WATCHERS = 32

Json = Mapping[str, object]


@dataclass(frozen=True)
class Point:
    """One moment of the history. ``time_ms`` is a date, in milliseconds since the epoch.

    ``first``: nothing was read for a while before it, so that a line does not lead to it.
    """

    time_ms: int
    first: bool
    rates: Rates


@dataclass(frozen=True)
class Update:
    """What a watcher gets: ``points`` since its last one, the newest ``stats``.

    ``placement`` is None when it is the one that the watcher has; ``placed`` says that it is given.
    """

    points: tuple[Point, ...]
    stats: Json
    placed: bool
    placement: Json | None


class Watching:
    """The readings and who watches them. Used from the event loop's thread alone.

    ``stats`` and ``placement`` give a reading and may take their time; ``pause`` waits for the next one to be
    due; inside ``beside``, what a reading raises is counted, and ends nothing.
    """

    def __init__(
        self,
        stats: Callable[[], Awaitable[Json]],
        placement: Callable[[], Awaitable[Json | None]],
        *,
        monotonic_s: Callable[[], float],
        wall_ns: Callable[[], int],
        beside: Callable[[], AbstractContextManager[None]],
        pause: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(INTERVAL_S),
        history: int = HISTORY,
        max_watchers: int = MAX_WATCHERS,
    ) -> None:
        self._stats, self._placement = stats, placement
        self._monotonic_s, self._wall_ns = monotonic_s, wall_ns
        self._beside, self._pause = beside, pause
        self._max_watchers = max_watchers
        self._points: deque[Point] = deque(maxlen=history)
        # How many readings there were, and how many of them found experts elsewhere.
        self.taken = self.moved = 0
        self.newest: tuple[Json, Json | None] = ({}, None)
        self.watchers = 0
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._closed = False

    @contextmanager
    def watched(self) -> Iterator[Watcher]:
        """Inside, readings are taken. Raises BusyError when too many watch already."""
        if self._closed:
            raise NotRunningError("the proxy is shutting down", "try again later")
        if self.watchers >= self._max_watchers:
            raise BusyError(f"{self.watchers} watch already", "close one of the dashboards", 10)
        self.watchers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._read(), name="watching")
        try:
            yield Watcher(self)
        finally:
            # The task ends by itself when it finds nobody any more.
            self.watchers -= 1

    async def close(self) -> None:
        """End the views; those that watch get no more updates."""
        self._closed = True
        self._tell()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def newer(self, than: int) -> bool:
        """Wait until more than ``than`` readings were taken; False: there will be none."""
        while self.taken <= than and not self._closed:
            await self._news.wait()
        return not self._closed

    def since(self, taken: int) -> tuple[Point, ...]:
        """The points after the first ``taken`` readings, as far as they are kept."""
        count = min(self.taken - taken, len(self._points))
        return tuple(self._points)[len(self._points) - count :]

    def _tell(self) -> None:
        # Whoever waits now is woken; whoever waits later waits for the next one.
        self._news.set()
        self._news = asyncio.Event()

    async def _read(self) -> None:
        before: Reading | None = None
        while self.watchers:
            now = None
            with self._beside():
                stats, placement = await asyncio.gather(self._stats(), self._placement())
                now = Reading(self._monotonic_s(), stats)
                point = Point(self._wall_ns() // 1_000_000, before is None, rates(before, now))
                self._keep(point, stats, placement)
            # After a reading that failed, the views show a gap.
            before = now
            await self._pause()
        self._task = None

    def _keep(self, point: Point, stats: Json, placement: Json | None) -> None:
        self.taken += 1
        self.moved += placement != self.newest[1]
        self._points.append(point)
        self.newest = (stats, placement)
        self._tell()


class Watcher:
    """One view: what it has seen so far."""

    def __init__(self, watching: Watching) -> None:
        self._watching = watching
        self._taken = 0
        self._moved = -1
        self._begun = watching.taken

    async def update(self) -> Update | None:
        """What is new, once there is something; None: there will be no more."""
        watching = self._watching
        # The first one brings the whole history, yet waits for a reading of now.
        if not await watching.newer(max(self._taken, self._begun)):
            return None
        stats, placement = watching.newest
        placed = self._moved != watching.moved
        update = Update(watching.since(self._taken), stats, placed, placement if placed else None)
        self._taken, self._moved = watching.taken, watching.moved
        return update
