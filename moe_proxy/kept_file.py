"""Owns one file that follows a state in memory: read once, written some time after a change, and at the end.

It never looks into the content, and a disk that cannot be written costs one warning, not a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from moe_proxy.files import replacing

logger = logging.getLogger(__name__)


class KeptFile:
    """Writes what ``state`` gives to ``path``; use as an async context manager.

    ``state`` is asked on the event loop, ``delay_s`` after the first change that is not written yet, and at
    the end; None means that there is nothing to write. ``saved``: the file holds a state of this run or of
    the one before.
    """

    def __init__(self, path: Path, state: Callable[[], bytes | None], *, delay_s: float = 2.0) -> None:
        self.path = path
        self.saved = False
        self._state = state
        self._delay_s = delay_s
        self._changed = asyncio.Event()
        self._warned = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> KeptFile:
        self._task = asyncio.create_task(self._run(), name=f"keeping {self.path.name}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._changed.is_set():
            self.write(self._state())

    def read(self) -> bytes | None:
        """The content, or None when there is none or, with a warning, when it cannot be read."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("%s cannot be read (%s): learning starts anew", self.path, error)
            return None
        self.saved = True
        return content

    def changed(self) -> None:
        """The state is another than that in the file."""
        self._changed.set()

    def removed(self) -> bool:
        """Whether somebody removed the file since it was read or written; says so once."""
        if not self.saved or self.path.exists():
            return False
        self.saved = False
        self._changed.clear()
        return True

    def write(self, content: bytes | None) -> None:
        """Write ``content`` now, if there is any. Never fails: the first of several failures is logged."""
        if content is None:
            return
        try:
            with replacing(self.path) as temporary:
                temporary.write_bytes(content)
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "%s cannot be written (%s): what is learned is lost at the end", self.path, error
                )
        else:
            self.saved = True
            self._warned = False

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            await asyncio.sleep(self._delay_s)
            # Cleared after the state was asked: what it finds out may be that there is nothing to write.
            content = self._state()
            self._changed.clear()
            # In a thread: a large state takes a while to write.
            await asyncio.to_thread(self.write, content)
