"""Where experts lie, and the parts of ``/stats`` that are the engine's, against the fake engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from moe_proxy.activity import Activity
from moe_proxy.domains.base import Classification
from moe_proxy.engine.control import EngineControl, PriorFeed
from moe_proxy.metrics import Metrics
from moe_proxy.model.layout import ModelLayout
from moe_proxy.report import Report
from moe_proxy.routing.active import ActiveRequests
from tests.support.fake_engine import PATIENCE_S, launch, supervisor, until
from tests.unit.test_active import MAP

# As the fake has them.
LAYOUT = ModelLayout("a", "m", (0, 1, 2, 3), 32, 4, dict.fromkeys(range(4), 4096), 1000, "ab" * 32)


async def test_placement_and_tiers(tmp_path: Path) -> None:
    """Residency per layer and expert, the prior, memory by tier; nothing once the engine is gone."""
    socket = launch(tmp_path).socket
    async with (
        supervisor(tmp_path) as engine,
        EngineControl(socket) as control,
        PriorFeed(control, min_interval_s=0.0) as feed,
    ):
        await engine.ready(PATIENCE_S)
        active = ActiveRequests(MAP, kappa=8.0, min_distance=0.05)
        activity = Activity(active, feed, control)
        report = Report("m", LAYOUT, "m", engine, control, feed, activity, Metrics(), None, None)
        before: Any = await report.placement()
        assert before["resident"] == dict.fromkeys("0123", "0" * 32)
        assert (before["experts"], before["prior"], before["remarks"]) == (32, None, [])

        activity.begin("1", "/v1/chat/completions", Classification({"codegen": 1.0}, "keyword"))
        await until(lambda: feed.pushed == 1)
        after: Any = await report.placement()
        assert activity.prior is not None
        for layer, pairs in activity.prior.layers.items():
            wanted = {expert for expert, _ in pairs}
            resident = {n for n, bit in enumerate(after["resident"][str(layer)]) if bit == "1"}
            assert resident == wanted
            assert after["prior"][str(layer)] == [
                *(round(1000 * probability) for _, probability in pairs), *[0] * (32 - len(pairs))
            ]  # fmt: skip

        stats: Any = await report.stats()
        assert stats["experts"]["tiers"]["ram"]["total_bytes"] == 4 * 32 * 4096
        assert stats["experts"]["policy"] == "posterior"
        assert stats["engine"]["rss_bytes"] > 1 << 20
        assert stats["engine"]["pid"] != os.getpid()
        assert [request["id"] for request in stats["in_flight"]] == ["1"]
        assert stats["remarks"] == []

        await engine.stop()
        assert await report.placement() is None
        stopped: Any = await report.stats()
        assert (stopped["experts"], stopped["engine"]["rss_bytes"]) == (None, None)
