"""Owns who is let in: the bounded queue, the drain at shutdown, and the work that follows an answer.

It never touches a request's bytes. Everything here belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager

from moe_proxy.errors import BusyError, MoeProxyError, NotRunningError
from moe_proxy.metrics import Metrics
from moe_proxy.proxy.context import Limits
from moe_proxy.proxy.keep_alive import KeepAlive
from moe_proxy.proxy.notices import Notices

logger = logging.getLogger(__name__)


class Ticket:
    """The place of one admitted request. ``failed`` is set by whoever sends its client an error in-band."""

    def __init__(self, task: asyncio.Task[object]) -> None:
        self._task = task
        self._cut_by: MoeProxyError | None = None
        self.failed = False

    def cut(self, error: MoeProxyError) -> None:
        """Interrupt the request at its next wait; there it meets ``error``."""
        self._cut_by = error
        self._task.cancel()

    @contextmanager
    def cuttable(self) -> Iterator[None]:
        """Inside, being cut is the error it was cut by, and not a cancellation (the client went away)."""
        try:
            yield
        except asyncio.CancelledError:
            if self._cut_by is None:
                raise
            # From Python 3.11 on, a task counts the cancellations that were asked for and not withdrawn.
            uncancel = getattr(self._task, "uncancel", None)
            if uncancel is not None:
                uncancel()
            raise self._cut_by from None


class Admission:
    """The queue in front of the engine, and the end of it all. ``limits`` may be changed at any time.

    ``notices`` are what its operator was told of requests.
    """

    def __init__(self, limits: Limits, metrics: Metrics, keep_alive: KeepAlive) -> None:
        self.keep_alive = keep_alive
        self.limits = limits
        self.notices = Notices()
        self._metrics = metrics
        self._tickets: set[Ticket] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._follow_ups: set[asyncio.Task[None]] = set()
        self.draining = False

    @contextmanager
    def admitted(self) -> Iterator[Ticket]:
        """A place for the running task. Raises BusyError: all are taken; NotRunningError: draining."""
        if self.draining:
            raise _shutting_down()
        if len(self._tickets) >= self.limits.max_in_flight:
            raise BusyError(
                f"all {self.limits.max_in_flight} places in the queue are taken",
                "try again later",
                self.limits.retry_after_s,
            )
        task = asyncio.current_task()
        assert task is not None
        ticket = Ticket(task)
        self._tickets.add(ticket)
        self._idle.clear()
        self._metrics.admitted()
        try:
            with self.keep_alive.used(), ticket.cuttable():
                yield ticket
        except Exception as error:
            # What the client did wrong is no failure of the service.
            ticket.failed = not isinstance(error, MoeProxyError) or error.http_status >= 500
            raise
        finally:
            self._metrics.finished(ticket.failed)
            self._tickets.discard(ticket)
            if not self._tickets:
                self._idle.set()

    def follow_up(self, step: str, work: Coroutine[object, object, None]) -> None:
        """Run ``work`` beside the requests, under an owner: shutdown waits for it, its failure is counted."""
        task = asyncio.create_task(self._followed(step, work), name=f"follow-up: {step}")
        self._follow_ups.add(task)
        task.add_done_callback(self._follow_ups.discard)

    async def _followed(self, step: str, work: Coroutine[object, object, None]) -> None:
        with self.beside(step):
            await work

    @contextmanager
    def beside(self, step: str) -> Iterator[None]:
        """Inside is a step that no answer may depend on: what it raises is counted, and logged once."""
        try:
            yield
        except Exception as error:
            # The one place that stops whatever comes: what works here was handed in, and may be anybody's.
            self._metrics.step_failed(step)
            self.notices.say(f"step {step} failed, and no request with it: {type(error).__name__}", error)

    async def drain(self, timeout_s: float) -> None:
        """Let nobody in, wait for the running requests up to ``timeout_s``, then cut those that are left."""
        self.draining = True
        if not await self._idle_within(timeout_s):
            logger.warning("%d requests still run after %g s: cutting them", len(self._tickets), timeout_s)
            for ticket in list(self._tickets):
                ticket.cut(_shutting_down())
            await self._idle_within(self.limits.cut_grace_s)

    async def settle(self, timeout_s: float) -> None:
        """Wait for the follow-ups; those that take longer than ``timeout_s`` are cancelled."""
        while self._follow_ups:
            _, late = await asyncio.wait(set(self._follow_ups), timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _idle_within(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except (asyncio.TimeoutError, TimeoutError):
            return False
        return True


def _shutting_down() -> NotRunningError:
    return NotRunningError("the proxy is shutting down", "try again later")
