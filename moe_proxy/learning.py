"""Owns that what finished requests used becomes the next prior, and survives a restart.

It stands between the learner, the active requests and one file in the data directory. It never sees a
prompt, and a disk that cannot be written costs one warning, not a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from moe_proxy.errors import ControlError, RouterMapError
from moe_proxy.files import write_text
from moe_proxy.routing.active import ActiveRequests
from moe_proxy.routing.collect import counts_of
from moe_proxy.routing.learner import Learner

logger = logging.getLogger(__name__)

_USE_INTERVAL_S = 1.0


def learned_path(state: Path, fingerprint: str) -> Path:
    """Where the learned counts of the model of ``fingerprint`` are kept in the data directory ``state``."""
    return state / f"learned-{fingerprint[:16]}.json"


class Learning:
    """Feeds ``learner`` and keeps its state in ``path``; use as an async context manager.

    The running requests use what was learned a second later at the latest while requests come, and when it is
    written: ``save_delay_s`` after a change, and at the end. When the file is removed while
    this runs (``moe-proxy map reset``), what was learned is forgotten.
    """

    def __init__(
        self,
        learner: Learner,
        active: ActiveRequests,
        path: Path,
        *,
        save_delay_s: float = 2.0,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._learner = learner
        self._active = active
        self._path = path
        self._save_delay_s = save_delay_s
        self._changed = asyncio.Event()
        self._clock_s = clock_s
        self._used_s = float("-inf")
        self._unused = False
        self._written = False
        self._warned = False
        self._task: asyncio.Task[None] | None = None
        self.refused = 0

    async def __aenter__(self) -> Learning:
        self._restore()
        self._active.use(self._learner.merged())
        self._task = asyncio.create_task(self._run(), name="learning")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._forget_if_reset()
        if self._changed.is_set():
            self._write(self._learner.dump())

    def learn(self, distribution: Mapping[str, float], usage: Mapping[str, object]) -> None:
        """Learn from the usage of a finished request, as the pager tells it. Never fails; see ``refused``."""
        self._forget_if_reset()
        try:
            tokens, counts = counts_of(usage, self._learner.key)
        except ControlError as error:
            self.refused += 1
            logger.debug("a request's counts were not learned: %s", error)
            return
        if self._learner.learn(distribution, tokens, counts):
            self._unused = True
            # Making a map of a large model takes milliseconds, and requests can end by the hundreds a second.
            if self._clock_s() - self._used_s >= _USE_INTERVAL_S:
                self._use()
            self._changed.set()

    def report(self) -> dict[str, object]:
        """What was learned, as JSON values for ``/stats``."""
        tokens = {label: round(count, 1) for label, count in self._learner.tokens.items()}
        return {"tokens": tokens, "file": str(self._path), "saved": self._written, "refused": self.refused}

    def _use(self) -> None:
        """Favour experts by what is known now."""
        self._active.use(self._learner.merged())
        self._unused, self._used_s = False, self._clock_s()

    def _restore(self) -> None:
        try:
            self._learner.restore(self._path.read_text(encoding="utf-8"), str(self._path))
            self._written = True
        except FileNotFoundError:
            pass
        except RouterMapError as error:
            logger.warning("what was learned before is not used: %s", error)
        except (OSError, UnicodeDecodeError) as error:
            logger.warning("%s cannot be read (%s): learning starts anew", self._path, error)

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            await asyncio.sleep(self._save_delay_s)
            self._forget_if_reset()
            if self._unused:
                self._use()
            self._changed.clear()
            # In a thread: a large model's counts take a while to write. Their text is made now, on this one.
            await asyncio.to_thread(self._write, self._learner.dump())

    def _forget_if_reset(self) -> None:
        if self._written and not self._path.exists():
            self._written = False
            self._learner.forget()
            self._use()
            self._changed.clear()

    def _write(self, text: str) -> None:
        try:
            write_text(self._path, text)
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "%s cannot be written (%s): what is learned is lost at the end", self._path, error
                )
        else:
            self._written = True
            self._warned = False
