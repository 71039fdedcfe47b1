"""The benchmark's parts: what is computed of samples, which arms there are, the result's file and picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from moe_proxy import planner, served
from moe_proxy.bench.arms import cpu_arms, gpu_arms
from moe_proxy.bench.chart import chart
from moe_proxy.bench.result import Result
from moe_proxy.bench.run import Schedule, Took
from moe_proxy.bench.sample import Sample, medians, percentile
from moe_proxy.config import load_settings
from moe_proxy.errors import ConfigError
from moe_proxy.hardware import Gpu, cpu_name, probe
from moe_proxy.model.layout import ModelLayout
from moe_proxy.planner import VramPlan, layers_on_cpu, split_of
from moe_proxy.process_usage import usage_of

GIB = 2**30
LAYOUT = ModelLayout(
    "qwen3moe", "m", (1, 2, 3, 4), 8, 2, dict.fromkeys((1, 2, 3, 4), GIB // 8), GIB, "f" * 64
)


def sample(**values: Any) -> Sample:
    """A sample; what is not given is 1."""
    names = Sample.__dataclass_fields__
    return Sample(**(dict.fromkeys(names, 1) | values))


def test_medians() -> None:
    """Medians over the samples that say it; the hit rate is one of each sample's own picks."""
    samples = [
        sample(decode_per_s=10.0, hits=1, picks=2, vram_bytes=None),
        sample(decode_per_s=30.0, hits=3, picks=4, vram_bytes=None),
        sample(decode_per_s=20.0, hits=None, picks=None, vram_bytes=None),
    ]
    found = medians(samples)
    assert found["decode_per_s"] == 20.0
    assert found["hit_rate"] == 0.625
    assert found["vram_bytes"] is None


@pytest.mark.parametrize(
    ("share", "expected"), [(0.5, 2.0), (0.95, 4.0), (0.75, 3.0), (1.0, 4.0), (0.01, 1.0)]
)
def test_percentiles_are_values_that_were_measured(share: float, expected: float) -> None:
    """p50 and p95 by nearest rank."""
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == expected
    assert percentile([], share) is None


@pytest.mark.parametrize(
    ("budget_gib", "layers"),
    [(1.0, 5), (1.9, 5), (2.0, 4), (3.5, 3), (4.0, 2), (5.0, 0), (0.5, 5)],
)
def test_stock_at_equal_vram(budget_gib: float, layers: int) -> None:
    """What the dense part leaves of the weights' room holds the experts of the last layers, whole ones."""
    assert layers_on_cpu(LAYOUT, int(budget_gib * GIB)) == layers


def test_arms_on_the_cpu(own_folders: None, planted_model: Path) -> None:
    """The pager at each budget, and one stock arm: the same build with the pager off."""
    settings = load_settings({"model": planted_model, "ram_budget": "10%"})
    low, high, stock = cpu_arms(settings, ["30%", "100%"])
    assert [arm.name for arm in (low, high, stock)] == ["pager 30%", "pager 100%", "stock"]
    assert low.against == high.against == "stock"
    assert low.served.plan.ram_budget_bytes == int(0.3 * low.served.plan.expert_bytes)
    assert (low.served.settings.pager, stock.served.settings.pager) == (True, False)
    assert stock.served.settings.ram_budget is None
    with pytest.raises(ConfigError, match="much"):
        cpu_arms(settings, ["much"])


def test_only_a_paged_plan_is_split(own_folders: None, planted_model: Path) -> None:
    """Without a GPU, and where all is in VRAM, stock needs no split of layers."""
    found = cpu_arms(load_settings({"model": planted_model}), ["30%"])[0].served
    last = found.layout.layers[-1]
    splits = {
        vram: split_of(
            replace(found.plan, vram=vram), found.layout, found.footprint, found.wanted.context
        ).vram
        for vram in (None, VramPlan("all", GIB, 0), VramPlan("paged", GIB // 2, 0))
    }
    assert list(splits.values()) == [
        None,
        VramPlan("all", GIB, 0),
        VramPlan("paged", GIB // 2, 0, layers_on_cpu=last + 1),
    ]


def test_arms_on_a_gpu(own_folders: None, planted_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each VRAM budget the pager, and stock with as many layers' experts in VRAM as fit."""
    card = Gpu(0, "Card", 12 * GIB, 11 * GIB, "8.6")
    monkeypatch.setattr(served, "probe", lambda: replace(probe(), gpus=(card,)))
    monkeypatch.setattr(planner, "DRIVER_BYTES", GIB)  # so that the small model does not fit
    settings = load_settings({"model": planted_model, "gpu": True})
    arms = gpu_arms(settings, ["1G", None])
    assert [(arm.name, arm.against) for arm in arms] == [
        ("pager 1G", "stock 1G"),
        ("stock 1G", None),
        ("pager all VRAM", "stock all VRAM"),
        ("stock all VRAM", None),
    ]
    plans = [arm.served.plan.vram for arm in arms]
    assert [plan.placement for plan in plans if plan] == ["paged", "paged", "all", "all"]
    assert [plan.layers_on_cpu for plan in plans if plan] == [None, 6, None, None]
    assert [arm.served.settings.pager for arm in arms] == [True, False, True, False]


@pytest.fixture
def result(own_folders: None, planted_model: Path) -> Result:
    """Two arms at one length, one of which failed at another one."""
    arms = cpu_arms(load_settings({"model": planted_model}), ["30%"])
    made = Result({"made": "by hand"}, arms)
    for name, speed in (("pager 30%", 30.0), ("stock", 20.0)):
        made.take(Took(name, load_s=1.5))
        made.take(Took(name, 128, sample(decode_per_s=speed)))
    made.take(Took("pager 30%", 512, sample(decode_per_s=5.0)))
    made.take(Took("stock", error="it died & <went>"))
    return made


def test_a_result(result: Result, tmp_path: Path) -> None:
    """The file holds conditions, samples, medians and errors; ratios are to the arm that is the rival."""
    path = tmp_path / "r.json"
    result.write(path)
    found = json.loads(path.read_text())
    assert (found["format"], found["complete"]) == ("moe-proxy-bench/1", False)
    assert [(row["arm"], row["prompt_tokens"]) for row in found["rows"]] == [
        ("pager 30%", 128),
        ("stock", 128),
        ("pager 30%", 512),
    ]
    assert [row["decode_by_stock"] for row in found["rows"]] == [1.5, None, None]
    assert found["rows"][0]["median"]["decode_per_s"] == 30.0
    assert found["rows"][0]["samples"][0]["decode_per_s"] == 30.0
    assert found["arms"][1]["error"] == "it died & <went>"
    assert found["arms"][0]["load_s"] == [1.5]
    assert list(tmp_path.glob(".r.json*")) == []


def test_the_picture_is_one(result: Result) -> None:
    """An SVG document with a bar per row and quantity, longest for the largest, whatever a name holds."""
    root = ElementTree.fromstring(chart(result, "a <model> & its machine"))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    bars = [bar for bar in root.iter("{http://www.w3.org/2000/svg}rect") if bar.get("rx")]
    assert len(bars) == 9
    decode = [float(bar.get("width", "0")) for bar in bars[:3]]
    assert decode[0] == 400.0 and decode[1] == pytest.approx(400.0 * 20 / 30, abs=0.1)
    assert "a <model> & its machine" in "".join(root.itertext())


def test_a_schedule() -> None:
    """The context holds the longest prompt and its answer; warm-ups come in each round."""
    schedule = Schedule((128, 512), tokens=32, runs=5, warm_ups=1, rounds=2, temperature=0.8, seed=1)
    assert schedule.context_length >= 512 + 32
    assert schedule.answers(3) == 3 * 2 * (5 + 2)


def test_the_processors_name(tmp_path: Path) -> None:
    """As the system says it; else its architecture, never nothing."""
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: A: fast one\n")
    assert cpu_name(path) == "A: fast one"
    assert cpu_name(tmp_path / "nowhere")


def test_what_a_process_uses() -> None:
    """A probe never fails: a process of ours has a size, one that is gone has none."""
    import os

    mine = usage_of(os.getpid())
    assert mine.rss_bytes is not None and mine.rss_bytes > 2**20
    nobody = usage_of(2**22 + 1)
    assert (nobody.rss_bytes, nobody.read_bytes, nobody.vram_bytes) == (None, None, None)
