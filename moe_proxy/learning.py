"""Owns that what finished requests used becomes the next prior, and survives a restart.

It stands between the learner, the active requests and one file in the data directory. It never sees a
prompt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from moe_proxy.errors import ControlError, RouterMapError
from moe_proxy.kept_file import KeptFile
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
        self._file = KeptFile(path, self._state, delay_s=save_delay_s)
        self._clock_s = clock_s
        self._used_s = float("-inf")
        self._unused = False
        self.refused = 0

    async def __aenter__(self) -> Learning:
        self._restore()
        self._active.use(self._learner.merged())
        await self._file.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._file.__aexit__(kind, error, trace)

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
            self._file.changed()

    def report(self) -> dict[str, object]:
        """What was learned, as JSON values for ``/stats``."""
        tokens = {label: round(count, 1) for label, count in self._learner.tokens.items()}
        file = self._file
        return {"tokens": tokens, "file": str(file.path), "saved": file.saved, "refused": self.refused}

    def _use(self) -> None:
        """Favour experts by what is known now."""
        self._active.use(self._learner.merged())
        self._unused, self._used_s = False, self._clock_s()

    def _restore(self) -> None:
        content = self._file.read()
        if content is None:
            return
        try:
            self._learner.restore(content.decode("utf-8"), str(self._file.path))
        except (RouterMapError, UnicodeDecodeError) as error:
            self._file.saved = False
            logger.warning("what was learned before is not used: %s", error)

    def _state(self) -> bytes | None:
        if self._forget_if_reset():
            return None
        if self._unused:
            self._use()
        return self._learner.dump().encode()

    def _forget_if_reset(self) -> bool:
        if not self._file.removed():
            return False
        self._learner.forget()
        self._use()
        return True
