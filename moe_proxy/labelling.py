"""Owns that labels corrected by people and clients teach the classifier, and survive a restart.

It stands between the HTTP surface and one file in the data directory, which holds weights and no text.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import TracebackType

from moe_proxy.domains.base import Classification
from moe_proxy.domains.corrections import Corrections
from moe_proxy.errors import ConfigError
from moe_proxy.kept_file import KeptFile

logger = logging.getLogger(__name__)

FILE_NAME = "corrections.npz"


class Labelling:
    """Feeds ``corrections`` and keeps their state in ``path``; use as an async context manager.

    When the file is removed while this runs, all labels are forgotten.
    """

    def __init__(self, corrections: Corrections, path: Path, *, save_delay_s: float = 2.0) -> None:
        self._corrections = corrections
        self._file = KeptFile(path, self._state, delay_s=save_delay_s)

    async def __aenter__(self) -> Labelling:
        content = self._file.read()
        if content is not None:
            try:
                self._corrections.restore(content, str(self._file.path))
            except ConfigError as error:
                self._file.saved = False
                logger.warning("labels corrected before are not used: %s", error)
        await self._file.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._file.__aexit__(kind, error, trace)

    async def learn(self, text: str, label: str) -> None:
        """Take ``label`` for what ``text`` is about. Raises ValueError for a label that cannot be learned."""
        self._forget_if_removed()
        if self._corrections.slow:
            changed = await asyncio.to_thread(self._corrections.learn, text, label)
        else:
            changed = self._corrections.learn(text, label)
        if changed:
            self._file.changed()

    async def classify(self, text: str) -> Classification:
        """What ``text`` is about by all that was learned so far."""
        if self._corrections.slow:
            return await asyncio.to_thread(self._corrections.classify, text)
        return self._corrections.classify(text)

    def report(self) -> dict[str, object]:
        """What was learned, as JSON values for ``/stats``."""
        file = self._file
        return {"learned": self._corrections.learned, "file": str(file.path), "saved": file.saved}

    def _state(self) -> bytes | None:
        return None if self._forget_if_removed() else self._corrections.dump()

    def _forget_if_removed(self) -> bool:
        if not self._file.removed():
            return False
        self._corrections.forget()
        return True
