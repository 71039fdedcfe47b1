"""Prometheus's names: documented, all of them, and the only ones that the Grafana dashboard asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from moe_proxy.metrics import RECENT_ANSWERS, Metrics

ROOT = Path(__file__).parents[2]
GRAFANA = ROOT / "deploy/grafana/moe-proxy.json"
# Labels that Prometheus itself adds, and the one of a histogram's buckets.
_GIVEN = {"instance", "job", "le"}


class Everything(dict[str, Any]):
    """An engine that knows every number it is asked for."""

    def get(self, name: str, default: object = None) -> object:
        """A mapping where one is looked for, else a word or a number."""
        if name in ("engine", "experts", "tiers", "ram"):
            return Everything(ram={})
        return "ready" if name == "state" else 1.0

    def items(self) -> Any:
        """One tier."""
        return [("ram", Everything())]


def _families() -> dict[str, tuple[str, str, set[str], set[str]]]:
    """Kind, text, labels and names of samples by the name that a query uses."""
    metrics = Metrics()
    metrics.answered("/x", 200, 0.1)
    metrics.first_token("/x", 0.1)
    metrics.classified(None)
    metrics.step_failed("x")
    found = {}
    for family in text_string_to_metric_families(metrics.render(Everything()).decode()):
        if family.name.endswith("_created"):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - _GIVEN
        samples = {sample.name for sample in family.samples}
        found[name] = (family.type, family.documentation, labels, samples)
    return found


def _documented() -> dict[str, tuple[str, str, set[str]]]:
    """The same from the table of docs/metrics.md."""
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(moe_proxy_\w+)` \| (\w+) \| ([^|]*) \| ([^|]*) \|$", text, re.MULTILINE)
    found = {name: (kind, said, set(re.findall(r"\w+", labels))) for name, kind, labels, said in rows}
    assert len(found) == len(rows), "a name stands twice"
    return found


def test_each_metric_is_documented_as_it_is() -> None:
    """docs/metrics.md and the code name the same metrics, with the same kinds, labels and meaning."""
    exposed = {name: (kind, said, labels) for name, (kind, said, labels, _) in _families().items()}
    assert _documented() == exposed
    assert len(exposed) > 20


def _queries(value: object) -> Iterator[str]:
    """Every PromQL expression, of panels and of variables."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in ("expr", "query") and isinstance(inner, str):
                yield inner
            else:
                yield from _queries(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _queries(inner)


def test_grafana_asks_for_what_there_is() -> None:
    """Every query of the dashboard names metrics that exist, and labels that they have."""
    families = _families()
    of_sample = {sample: family for family in families.values() for sample in family[3]}
    queries = [query for query in _queries(json.loads(GRAFANA.read_text())) if query != "prometheus"]
    assert len(queries) > 20
    for query in queries:
        names = re.findall(r"\bmoe_proxy_\w+", query)
        assert names, query
        assert query.count("(") == query.count(")"), query
        for name in names:
            assert name in of_sample, f"{name} in {query}"
            has = of_sample[name][2] | _GIVEN
            asked = set(re.findall(r"(\w+)(?==~|!=|=\")", query))
            for listed in re.findall(r"\bby \(([^)]*)\)", query):
                asked |= set(re.findall(r"\w+", listed))
            assert asked <= has, f"{asked - has} in {query}"
        counters = {name for name in names if of_sample[name][0] in ("counter", "histogram")}
        for name in counters:
            assert re.search(rf"\b(rate|increase)\({name}\b", query), f"a counter as it is: {query}"


def test_grafana_shows_each_panel_in_its_own_place() -> None:
    """Ids are unique and no panel hides another."""
    panels = json.loads(GRAFANA.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        apart = any(
            first[axis] + first[size] <= second[axis]
            for first, second in ((one, other), (other, one))
            for axis, size in (("x", "w"), ("y", "h"))
        )
        assert apart, (one, other)


def test_what_is_unknown_is_left_out() -> None:
    """An engine that does not answer has no numbers in /metrics, rather than zeros."""
    rendered = Metrics().render(
        {"engine": {"state": "loading", "restarts": 0, "rss_bytes": None}, "experts": None}
    )
    assert b"moe_proxy_engine_ready 0.0" in rendered
    assert b"moe_proxy_expert" not in rendered
    assert b"moe_proxy_tier" not in rendered
    assert b"rss" not in rendered


def test_tiers() -> None:
    """VRAM and RAM by tier and part, in bytes; what is no size is left out."""
    tiers = {
        "ram": {"home": "mmap", "budget_bytes": 5, "experts": 9},
        "vram": {"arena_bytes": 7, "frames": []},
    }
    rendered = Metrics().render({"experts": {"tiers": tiers}}).decode()
    assert re.findall(r"^moe_proxy_tier_bytes\{.*", rendered, re.MULTILINE) == [
        'moe_proxy_tier_bytes{part="budget",tier="ram"} 5.0',
        'moe_proxy_tier_bytes{part="arena",tier="vram"} 7.0',
    ]


def test_percentiles_are_times_that_were_measured() -> None:
    """Nearest rank over the last answers; none yet is no data."""
    metrics = Metrics()
    assert metrics.latency()["duration_s"] == {"p50": None, "p95": None, "p99": None, "count": 0}
    for number in range(1, 101):
        metrics.generated(number / 10)
        metrics.first_token("/x", number / 1000)
    latency: Any = metrics.latency()
    assert latency["duration_s"] == {"p50": 5.0, "p95": 9.5, "p99": 9.9, "count": 100}
    assert latency["first_token_s"]["p50"] == 0.05
    for _ in range(RECENT_ANSWERS):
        metrics.generated(1.0)
    latency = metrics.latency()
    assert latency["duration_s"] == {"p50": 1.0, "p95": 1.0, "p99": 1.0, "count": RECENT_ANSWERS}
