"""Owns the JSON of ``/stats``, and of where experts lie: which number comes from where. It counts nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field

from moe_proxy import __version__
from moe_proxy.activity import Activity
from moe_proxy.engine.control import EngineControl, PriorFeed
from moe_proxy.engine.supervisor import EngineStatus, State, Supervisor
from moe_proxy.errors import EngineError
from moe_proxy.labelling import Labelling
from moe_proxy.learning import Learning
from moe_proxy.metrics import Metrics
from moe_proxy.model.layout import ModelLayout
from moe_proxy.process_usage import Usage, usage_of
from moe_proxy.remarks import constant_layers, constant_routing, remarks
from moe_proxy.routing.prior import Prior


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
    labelling: Labelling | None
    started_s: float = field(default_factory=time.monotonic)

    async def stats(self) -> Mapping[str, object]:
        """The JSON of ``/stats``; ``experts`` is None without a pager, and while it cannot be asked."""
        layout, status, feed = self.layout, self.supervisor.status, self.feed
        prior = self.activity.prior
        experts, in_flight, usage = await asyncio.gather(
            self._experts(status), self.activity.in_flight(), _usage(status.pid)
        )
        said: dict[str, object] = {
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
                "progress": status.progress,
                "since_s": round(status.since_s, 1),
                **asdict(usage),
            },
            "requests": self.metrics.requests(),
            "in_flight": in_flight,
            "latency": self.metrics.latency(),
            "prior": {
                "map": self.router_map,
                "id": prior.id if prior else None,
                "pushed": feed.pushed,
                "failed": feed.failed,
            },
            "learned": self.learning.report() if self.learning else None,
            "labels": self.labelling.report() if self.labelling else None,
            "pager": self.control is not None,
            "experts": experts,
            "recent": self.activity.recent(),
        }
        return {**said, "remarks": [asdict(remark) for remark in remarks(said)]}

    async def placement(self) -> Mapping[str, object] | None:
        """Where experts lie, for each MoE layer; None without a pager, and while it cannot be asked.

        ``resident`` is a text of 0 and 1, one character an expert; ``prior``, if there is one, the
        probability of a pick in thousandths. ``remarks`` are what the picks of the layers give reason to say.
        """
        if self.control is None or self.supervisor.status.state is not State.READY:
            return None
        try:
            residency, usage = await asyncio.gather(self.control.residency(), self.control.usage())
        except EngineError:
            return None
        experts, prior = self.layout.experts, self.activity.prior
        constant = constant_layers(usage["layers"], self.layout.experts_used)
        return {
            "experts": experts,
            "resident": {layer: _bits(ids, experts) for layer, ids in residency["layers"].items()},
            "prior": _thousandths(prior, experts) if prior else None,
            "remarks": [asdict(remark) for remark in constant_routing(constant)],
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
            "policy": described["policy"]["name"],
            "tiers": described["tiers"],
            "reasons": described["reasons"],
        }


async def _usage(pid: int | None) -> Usage:
    """What the engine's process uses; the driver of a GPU may take its time to say it."""
    return await asyncio.to_thread(usage_of, pid) if pid is not None else Usage(None, None, None)


def _bits(ids: Collection[int], experts: int) -> str:
    resident = set(ids)
    return "".join("1" if expert in resident else "0" for expert in range(experts))


def _thousandths(prior: Prior, experts: int) -> dict[str, list[int]]:
    rows = {}
    for layer, pairs in prior.layers.items():
        row = [0] * experts
        for expert, probability in pairs:
            row[expert] = round(1000 * probability)
        rows[str(layer)] = row
    return rows
