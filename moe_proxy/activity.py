"""Owns what is known of running and recent requests: their domain, the prior they ask for, what they used.

It stands between the HTTP surface, which tells it of requests, and the engine's control API. Nothing here may
fail a request: what goes wrong is counted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from moe_proxy.domains.base import Classification
from moe_proxy.engine.control import EngineControl, PriorFeed
from moe_proxy.errors import EngineError
from moe_proxy.routing.active import ActiveRequests
from moe_proxy.routing.prior import Prior

logger = logging.getLogger(__name__)

RECENT_REQUESTS = 20
# No oftener does the feed push, and a mixture of a large model takes a while to work out.
_LOOK_INTERVAL_S = 0.05
# Each of them is a question to the engine, and nobody reads a longer list.
IN_FLIGHT_SHOWN = 16


@dataclass(frozen=True)
class FinishedRequest:
    """One request and what the pager counted for it; counts are 0 when the engine could not be asked."""

    id: str
    path: str
    domain: str | None
    confidence: float
    classifier: str
    prior: str | None
    seconds: float
    tokens: int
    picks: int
    hits: int


@dataclass(frozen=True)
class _Running:
    path: str
    classification: Classification | None
    prior: str | None
    started_s: float


class Activity:
    """The observer of all requests. Used from the event loop's thread alone.

    ``control`` is None when there is no pager that could be asked.
    ``learn`` is given the distribution of each finished request and what the pager counted for it.
    ``uncounted`` is how many requests ended without the pager having told what they used.
    """

    def __init__(
        self,
        active: ActiveRequests,
        feed: PriorFeed,
        control: EngineControl | None,
        clock_s: Callable[[], float] = time.monotonic,
        learn: Callable[[Mapping[str, float], Mapping[str, object]], None] | None = None,
    ) -> None:
        self._active = active
        self._feed = feed
        self._control = control
        self._clock_s = clock_s
        self._learn = learn
        self._running: dict[str, _Running] = {}
        self._look: asyncio.TimerHandle | None = None
        self._looked_s = float("-inf")
        self.finished: deque[FinishedRequest] = deque(maxlen=RECENT_REQUESTS)
        self.uncounted = 0

    @property
    def prior(self) -> Prior | None:
        """The prior of the present requests, or of the last ones."""
        return self._active.prior

    def begin(self, request_id: str, path: str, classification: Classification | None) -> None:
        """A request was admitted and classified (None: it has no text to classify)."""
        if classification is not None:
            self._active.add(request_id, classification.distribution)
            self._changed()
        prior = self._active.prior
        self._running[request_id] = _Running(
            path, classification, prior.id if prior else None, self._clock_s()
        )

    async def end(self, request_id: str) -> None:
        """The request's last byte was sent, or its client went away."""
        request = self._running.pop(request_id, None)
        if request is None:
            return
        if request.classification is not None:
            self._active.remove(request_id)
            if len(self._active):
                self._changed()
        usage: Mapping[str, object] = {}
        if request.classification is not None and self._control is not None:
            try:
                usage = await self._control.usage(request=request_id)
            except EngineError as error:
                self.uncounted += 1
                logger.debug("no usage of request %s: %s", request_id, error)
            else:
                if self._learn is not None:
                    self._learn(request.classification.distribution, usage)
        self.finished.append(
            FinishedRequest(
                id=request_id,
                path=request.path,
                domain=request.classification.domain if request.classification else None,
                confidence=request.classification.confidence if request.classification else 0.0,
                classifier=request.classification.classifier if request.classification else "",
                prior=request.prior,
                seconds=round(self._clock_s() - request.started_s, 3),
                tokens=_count(usage, "tokens"),
                picks=_count(usage, "picks"),
                hits=_count(usage, "hits"),
            )
        )

    def recent(self) -> list[dict[str, object]]:
        """The last requests, newest last, as JSON values."""
        return [asdict(request) for request in self.finished]

    async def in_flight(self) -> list[dict[str, object]]:
        """The oldest running requests as JSON values; ``tokens`` are those computed so far, prompt included.

        None: it waits for a slot, or there is no pager that could be asked.
        """
        running = list(self._running.items())[:IN_FLIGHT_SHOWN]
        counts = await asyncio.gather(*(self._tokens(request_id) for request_id, _ in running))
        now_s = self._clock_s()
        return [
            {
                "id": request_id,
                "path": request.path,
                "domain": request.classification.domain if request.classification else None,
                "confidence": request.classification.confidence if request.classification else 0.0,
                "seconds": round(now_s - request.started_s, 3),
                "tokens": tokens,
            }
            for (request_id, request), tokens in zip(running, counts, strict=True)
        ]

    async def _tokens(self, request_id: str) -> int | None:
        if self._control is None:
            return None
        try:
            return _count(await self._control.usage(request=request_id), "tokens")
        except EngineError:
            return None

    def close(self) -> None:
        """Look at nothing any more."""
        if self._look is not None:
            self._look.cancel()

    def _changed(self) -> None:
        """Look at the mixture now; if that was done a moment ago, once for all that changes meanwhile."""
        if self._look is not None:
            return
        wait_s = self._looked_s + _LOOK_INTERVAL_S - self._clock_s()
        if wait_s > 0:
            self._look = asyncio.get_running_loop().call_later(wait_s, self._offer_prior)
        else:
            self._offer_prior()

    def _offer_prior(self) -> None:
        self._look, self._looked_s = None, self._clock_s()
        prior = self._active.moved()
        if prior is not None:
            self._feed.offer(prior)


def _count(usage: Mapping[str, object], name: str) -> int:
    value = usage.get(name, 0)
    return value if isinstance(value, int) else 0
