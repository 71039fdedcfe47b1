"""Owns how long the model stays loaded after its last request; how it is unloaded is handed in.

It never loads anything: whoever needs the engine asks the backend to be ready, and that wakes it. Everything
here belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# What is longer than this is for ever: event loops do not count further, dates in answers neither.
_LONGEST_S = 10 * 365 * 86400.0


@dataclass(frozen=True)
class KeepAlivePolicy:
    """What a ``keep_alive`` is worth.

    ``obeyed``: as in Ollama, the model is unloaded ``default_s`` (negative: never) after its last request,
    or after the time that the last request with a ``keep_alive`` named. Otherwise only a request without a
    prompt unloads it, with ``keep_alive: 0``: loading a large model takes minutes, and a script's habit must
    not throw it away.
    """

    obeyed: bool = False
    default_s: float = 300.0


class KeepAlive:
    """The time that is left. ``unload`` must not wait; None: the model cannot be unloaded."""

    def __init__(self, policy: KeepAlivePolicy, unload: Callable[[], None] | None) -> None:
        self._unload = unload
        self._obeyed = policy.obeyed
        self._default_s = policy.default_s if policy.obeyed else -1.0
        self._seconds = self._default_s
        self._users = 0
        self._expired = False
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, the model is needed."""
        self._users += 1
        self._stop_timer()
        try:
            yield
        finally:
            self._users -= 1
            if self._users == 0:
                self._start_timer()

    def asked(self, seconds: float | None) -> bool:
        """A request, still running, names a time (negative: for ever); whether that is heeded."""
        if seconds is not None and self._obeyed:
            self._seconds = seconds
        return seconds is None or self._obeyed

    def expire(self) -> None:
        """Unload as soon as no request needs the model."""
        self._expired = True

    def renew(self) -> None:
        """Somebody wants the model loaded: an unloading that has not begun is off."""
        self._expired = False

    def left_s(self) -> float | None:
        """Seconds until the model is unloaded if nobody asks for anything; None: never."""
        if self._timer is not None:
            return max(0.0, self._timer.when() - asyncio.get_running_loop().time())
        return None if self._unload is None or not 0 <= self._seconds <= _LONGEST_S else self._seconds

    def close(self) -> None:
        """Unload nothing any more."""
        self._stop_timer()
        self._unload = None

    def _start_timer(self) -> None:
        if self._unload is None:
            return
        if self._expired or self._seconds == 0:
            # In the loop's next round, so that the answer to who asked for it goes out first.
            self._timer = asyncio.get_running_loop().call_later(0, self._run_out)
        elif 0 < self._seconds <= _LONGEST_S:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._run_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _run_out(self) -> None:
        self._timer = None
        self._expired = False
        # What was asked for goes with the model; the next load begins anew.
        self._seconds = self._default_s
        if self._unload is not None:
            self._unload()
