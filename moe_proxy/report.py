"""Owns the JSON of ``/stats``: which number comes from where. It counts nothing itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from moe_proxy import __version__
from moe_proxy.activity import Activity
from moe_proxy.engine.control import EngineControl, PriorFeed
from moe_proxy.engine.supervisor import EngineStatus, State, Supervisor
from moe_proxy.errors import EngineError
from moe_proxy.learning import Learning
from moe_proxy.metrics import Metrics
from moe_proxy.model.layout import ModelLayout


@dataclass(frozen=True)
class Report:
    """The numbers behind ``/stats``, gathered from every part. ``control`` is None when the pager is off.

    Those under ``experts`` are the engine's own and start anew with it; ``start_id`` tells two starts apart.
    """

    model: str
    layout: ModelLayout
    router_map: str | None
    supervisor: Supervisor
    control: EngineControl | None
    feed: PriorFeed
    activity: Activity
    metrics: Metrics
    learning: Learning | None
    started_s: float = field(default_factory=time.monotonic)

    async def stats(self) -> Mapping[str, object]:
        """The JSON of ``/stats``; ``experts`` is None without a pager, and while it cannot be asked."""
        layout, status, feed = self.layout, self.supervisor.status, self.feed
        prior = self.activity.prior
        return {
            "version": __version__,
            "uptime_s": round(time.monotonic() - self.started_s, 1),
            "model": {
                "name": self.model,
                "architecture": layout.architecture,
                "layers": len(layout.layers),
                "experts": layout.experts,
                "experts_used": layout.experts_used,
            },
            "engine": {
                "state": status.state.value,
                "reason": status.reason,
                "restarts": status.restarts,
                "pid": status.pid,
            },
            "requests": self.metrics.requests(),
            "prior": {
                "map": self.router_map,
                "id": prior.id if prior else None,
                "pushed": feed.pushed,
                "failed": feed.failed,
            },
            "learned": self.learning.report() if self.learning else None,
            "pager": self.control is not None,
            "experts": await self._experts(status),
            "recent": self.activity.recent(),
        }

    async def _experts(self, status: EngineStatus) -> Mapping[str, object] | None:
        if self.control is None or status.state is not State.READY:
            return None
        try:
            counters, described = await asyncio.gather(self.control.stats(), self.control.experts())
        except EngineError:
            return None
        return {
            **counters,
            "mode": described["mode"],
            "pending": described["mover"]["pending"],
            "reasons": described["reasons"],
        }
