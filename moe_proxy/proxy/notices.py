"""Owns what the operator is told of requests: each thing once, however often it happens.

Whoever sends requests decides how often and with which names something happens. The log must neither be
filled by that nor say nothing.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

# A client can make up names without end; who reads a log has seen enough after so many.
_MOST = 200


class Notices:
    """Texts that were said. ``error``, where there is one, is shown with its traceback."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, text: str, error: BaseException | None = None) -> None:
        """Log ``text`` as a warning, unless it was said before or too much was said already."""
        if text in self._said or len(self._said) >= _MOST:
            return
        self._said.add(text)
        logger.warning("%s", text, exc_info=error)
        if len(self._said) == _MOST:
            logger.warning("after %d different notices about requests no more are logged", _MOST)
