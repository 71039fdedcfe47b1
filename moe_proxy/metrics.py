"""Owns what the proxy counts and how it is exposed for Prometheus; it never asks anybody for a number.

Every instance has its own registry, so that two proxies in one process do not count for each other.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics import Gauge, Histogram

CONTENT_TYPE = CONTENT_TYPE_LATEST
_ENGINE_PREFIX = b"llamacpp:"

_LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

# Percentiles are of so many answers, the last ones.
RECENT_ANSWERS = 500

# Counter of the pager: our name after ``moe_proxy_`` and what it counts.
_EXPERT_COUNTERS = {
    "tokens": ("expert_tokens", "Tokens the pager has seen"),
    "picks": ("expert_picks", "Experts picked by the router"),
    "hits": ("expert_hits", "Picks whose expert was resident"),
    "misses": ("expert_misses", "Picks whose expert was not resident"),
    "hit_bytes": ("expert_hit_bytes", "Bytes of picked experts that were resident"),
    "miss_bytes": ("expert_miss_bytes", "Bytes of picked experts that were not resident"),
    "promotions": ("expert_promotions", "Experts made resident"),
    "promoted_bytes": ("expert_promoted_bytes", "Bytes of experts made resident"),
    "demotions": ("expert_demotions", "Experts given up"),
    "given_back_bytes": ("expert_given_back_bytes", "Bytes given back to the system"),
}
_EXPERT_GAUGES = {
    "resident_bytes": "Bytes of resident experts",
    "resident_experts": "Experts that are resident",
    "locked_bytes": "Bytes of experts locked in RAM",
    "budget_bytes": "Bytes that resident experts may take: of VRAM with a GPU that pages, else of RAM",
}
_ENGINE_GAUGES = {
    "rss_bytes": "RAM that llama-server has in use, mapped files included",
    "vram_bytes": "VRAM that llama-server has in use, on all GPUs",
}
# What a tier says of itself: all of it in bytes.
_TIER_PARTS = (
    "budget_bytes",
    "total_bytes",
    "resident_bytes",
    "locked_bytes",
    "arena_bytes",
    "staging_bytes",
)


class Metrics:
    """Counters of one proxy. Used from the event loop's thread alone."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._requests = PrometheusCounter(
            "moe_proxy_requests", "Requests answered", ("route", "status"), registry=self._registry
        )
        self._latency_s = Histogram(
            "moe_proxy_request_duration_seconds",
            "From the request's head to the last byte of its answer",
            ("route",),
            buckets=_LATENCY_BUCKETS_S,
            registry=self._registry,
        )
        self._first_byte_s = Histogram(
            "moe_proxy_time_to_first_token_seconds",
            "From the request's head to the first byte of a streamed answer that comes from the model",
            ("route",),
            buckets=_LATENCY_BUCKETS_S,
            registry=self._registry,
        )
        self._in_flight = Gauge(
            "moe_proxy_requests_in_flight", "Admitted requests not yet answered", registry=self._registry
        )
        self._domains = PrometheusCounter(
            "moe_proxy_classified", "Classified requests", ("domain",), registry=self._registry
        )
        self._failures = PrometheusCounter(
            "moe_proxy_step_failures",
            "Steps beside the answer that failed without failing the request",
            ("step",),
            registry=self._registry,
        )
        self._engine = _EngineCollector()
        self._registry.register(self._engine)
        self._total = 0
        self._failed = 0
        self._active = 0
        self._domain_counts: Counter[str] = Counter()
        self._failure_counts: Counter[str] = Counter()
        self._recent_first_token_s: deque[float] = deque(maxlen=RECENT_ANSWERS)
        self._recent_duration_s: deque[float] = deque(maxlen=RECENT_ANSWERS)

    def answered(self, route: str, status: int, seconds: float) -> None:
        """A request of ``route`` (a path pattern, never a client's text) was answered with ``status``."""
        self._requests.labels(route, str(status)).inc()
        self._latency_s.labels(route).observe(seconds)

    def first_token(self, route: str, seconds: float) -> None:
        """The first bytes of a streamed answer left after ``seconds``."""
        self._first_byte_s.labels(route).observe(seconds)
        self._recent_first_token_s.append(seconds)

    def generated(self, seconds: float) -> None:
        """A request that generates text was answered in ``seconds``."""
        self._recent_duration_s.append(seconds)

    def admitted(self) -> None:
        """A request for the engine was let in."""
        self._active += 1
        self._in_flight.inc()

    def finished(self, failed: bool) -> None:
        """An admitted request has ended; ``failed``: its client got an error, or half an answer."""
        self._active -= 1
        self._total += 1
        self._failed += failed
        self._in_flight.dec()

    def classified(self, domain: str | None) -> None:
        """A request was classified; None: the classifier abstained."""
        name = domain or "abstained"
        self._domains.labels(name).inc()
        self._domain_counts[name] += 1

    def step_failed(self, step: str) -> None:
        """A step beside the answer failed (classify, observe, stats)."""
        self._failures.labels(step).inc()
        self._failure_counts[step] += 1

    def requests(self) -> dict[str, object]:
        """The plain counters behind ``/stats``: requests for the engine, their domains, failed side steps."""
        return {
            "total": self._total,
            "active": self._active,
            "failed": self._failed,
            "domains": dict(self._domain_counts),
            "step_failures": dict(self._failure_counts),
        }

    def latency(self) -> dict[str, object]:
        """Percentiles of the last answers that generated text, in seconds; None when there are none yet."""
        return {
            "first_token_s": _percentiles(self._recent_first_token_s),
            "duration_s": _percentiles(self._recent_duration_s),
        }

    def render(self, stats: Mapping[str, object]) -> bytes:
        """Everything in Prometheus's text format.

        ``stats`` is the JSON behind ``/stats``. Read from it: ``engine.restarts``, ``engine.state``,
        what its process uses and, when the pager answered, what stands under ``experts`` with its own names.
        """
        self._engine.stats = stats
        return generate_latest(self._registry)


def engine_lines(text: bytes) -> bytes:
    """llama-server's metrics with ``llama_server_`` for its own prefix; other lines are left out.

    Its colon belongs to rules that are computed from metrics, and would not say whose they are.
    """
    kept: list[bytes] = []
    for line in text.splitlines():
        comment, mark, rest = line.partition(_ENGINE_PREFIX)
        if mark and comment in (b"", b"# HELP ", b"# TYPE "):
            kept.append(comment + b"llama_server_" + rest + b"\n")
    return b"".join(kept)


class _EngineCollector:
    """Turns the last known numbers of the engine into metrics; what is unknown is left out."""

    def __init__(self) -> None:
        self.stats: Mapping[str, object] = {}

    def describe(self) -> list[Metric]:
        """Nothing: names depend on what the engine reports."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One metric per number that is there."""
        engine = _mapping(self.stats.get("engine"))
        restarts = _number(engine.get("restarts"))
        if restarts is not None:
            yield CounterMetricFamily("moe_proxy_engine_restarts", "Restarts of llama-server", value=restarts)
        state = engine.get("state")
        if isinstance(state, str):
            ready = float(state == "ready")
            yield GaugeMetricFamily("moe_proxy_engine_ready", "1 while llama-server is ready", value=ready)
        for name, text in _ENGINE_GAUGES.items():
            amount = _number(engine.get(name))
            if amount is not None:
                yield GaugeMetricFamily(f"moe_proxy_engine_{name}", text, value=amount)
        read_bytes = _number(engine.get("read_bytes"))
        if read_bytes is not None:
            text = "Bytes that disks delivered for llama-server's present process"
            yield CounterMetricFamily("moe_proxy_engine_read_bytes", text, value=read_bytes)
        experts = _mapping(self.stats.get("experts"))
        for name, (metric, text) in _EXPERT_COUNTERS.items():
            count = _number(experts.get(name))
            if count is not None:
                yield CounterMetricFamily(f"moe_proxy_{metric}", text, value=count)
        for name, text in _EXPERT_GAUGES.items():
            amount = _number(experts.get(name))
            if amount is not None:
                yield GaugeMetricFamily(f"moe_proxy_expert_{name}", text, value=amount)
        tiers = _mapping(experts.get("tiers"))
        if tiers:
            text = "Bytes of a memory tier, by part"
            family = GaugeMetricFamily("moe_proxy_tier_bytes", text, labels=("tier", "part"))
            for tier, said in tiers.items():
                for part in _TIER_PARTS:
                    size_bytes = _number(_mapping(said).get(part))
                    if size_bytes is not None:
                        family.add_metric((tier, part.removesuffix("_bytes")), size_bytes)
            yield family


def _percentiles(seconds: Collection[float]) -> dict[str, object]:
    """By nearest rank: each is a time that was measured."""
    ranked = sorted(seconds)

    def at(share: float) -> float | None:
        return round(ranked[math.ceil(share * len(ranked)) - 1], 6) if ranked else None

    return {"p50": at(0.5), "p95": at(0.95), "p99": at(0.99), "count": len(ranked)}


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
