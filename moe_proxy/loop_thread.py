"""Owns one event loop in a thread of its own, for callers that have none; what runs there is theirs."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from moe_proxy.errors import UsageError

Result = TypeVar("Result")


class LoopThread:
    """The loop runs from now until ``close``."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        # A program that forgets to close must still be able to end.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # Whatever is handed over is so before the loop is told to stop, or not at all.
        self._handing = threading.Lock()
        self._closed = False
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run ``work`` on the loop and give its result; from any other thread, also from several at once.

        An exception that strikes the caller meanwhile (KeyboardInterrupt) first cancels ``work`` and waits
        for its end. Raises what ``work`` raises, concurrent.futures.CancelledError when ``close`` ended it,
        and UsageError on the loop's own thread or after ``close``.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise UsageError(
                "a runtime's own event loop cannot wait for itself", "use AsyncHybridMoERuntime in coroutines"
            )
        done: concurrent.futures.Future[Result] = concurrent.futures.Future()
        tasks: list[asyncio.Task[Result]] = []

        def begin() -> None:
            task = self._loop.create_task(work)
            tasks.append(task)
            task.add_done_callback(lambda ended: _settle(done, ended))

        def cancel() -> None:
            # The loop takes calls in their order: what has not begun by now was never handed over.
            if tasks:
                tasks[0].cancel()
            else:
                work.close()
                done.set_exception(concurrent.futures.CancelledError())

        try:
            with self._handing:
                if self._closed:
                    work.close()
                    done.set_exception(UsageError("the runtime was closed", "start it again"))
                else:
                    self._loop.call_soon_threadsafe(begin)
            return done.result()
        except BaseException:
            if not done.done():
                # A loop that is closed by now has ended all that it had.
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(cancel)
                concurrent.futures.wait([done])
            raise

    def close(self) -> None:
        """Cancel what still runs, wait for its end, end the thread. A second call does nothing."""
        with self._handing:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            asyncio.set_event_loop(None)
            loop.close()


def _settle(done: concurrent.futures.Future[Result], task: asyncio.Task[Result]) -> None:
    if task.cancelled():
        done.set_exception(concurrent.futures.CancelledError())
        return
    error = task.exception()
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(task.result())
