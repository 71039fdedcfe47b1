"""What a plan comes to: memory, hit rate, speed, and what to change."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moe_proxy.errors import ConfigError
from moe_proxy.forecast import Bandwidths, Case, Rate, assumed, forecast, improvements
from moe_proxy.hardware import Gpu, Hardware
from moe_proxy.model.footprint import Footprint
from moe_proxy.model.layout import ModelLayout
from moe_proxy.planner import DRIVER_BYTES, ENGINE_RESERVE_BYTES, Context, RamBudget, Wanted
from moe_proxy.routing.router_map import DomainCounts, ModelKey, RouterMap

GIB = 2**30
SLAB = 884_736
# The shapes of the model that docs/benchmarks.md was measured with, in bytes.
LAYOUT = ModelLayout(
    "qwen3moe", "m", tuple(range(48)), 128, 8, dict.fromkeys(range(48), 3 * SLAB), 1_803_000_000, "ab" * 32
)
FOOTPRINT = Footprint(
    dense_bytes=1_803_000_000,
    table_bytes=622_000_000,
    tied=False,
    key_width=48 * 512,
    value_width=48 * 512,
    state_width=0,
    activation_width=3 * 9 * 2048,
    staged_bytes=128 * SLAB,
)
CARD = Gpu(0, "NVIDIA Card", 144 * GIB, 140 * GIB, "9.0")
MACHINE = Hardware(128 * GIB, 100 * GIB, 16, None, (CARD,))


def bandwidths(vram: float = 4800, link: float = 51, ram: float = 100, disk: float = 2) -> Bandwidths:
    """Bandwidths in GB/s."""
    rates = (Rate(number * 1e9, "measured") for number in (vram, link, ram, disk))
    return Bandwidths(*rates, layer_overhead_s=70e-6)


def case(
    vram_budget_bytes: int | None = None,
    hardware: Hardware = MACHINE,
    router_map: RouterMap | None = None,
    *,
    gpu: bool = True,
    ram_budget: RamBudget | None = None,
) -> Case:
    """The model on a machine, 4096 tokens of context."""
    wanted = Wanted(gpu, Context(4096), ram_budget, vram_budget_bytes)
    return Case(LAYOUT, FOOTPRINT, hardware, wanted, bandwidths(), router_map)


def skewed_map(busy: int, share: float) -> RouterMap:
    """In each layer ``busy`` experts take ``share`` of the picks of one domain; another routes evenly."""
    cold = round(1e6 * (1 - share) / (128 - busy))
    hot = round(1e6 * share / busy)
    row = (hot,) * busy + (cold,) * (128 - busy)
    domains = {
        "code": DomainCounts(1_000_000, dict.fromkeys(LAYOUT.layers, row)),
        "math": DomainCounts(1_000_000, dict.fromkeys(LAYOUT.layers, (10_000,) * 128)),
    }
    return RouterMap(ModelKey.of(LAYOUT), {}, domains)


@pytest.mark.parametrize(
    ("budget_bytes", "arena_bytes"), [(3_270_508_544, 228_777_984), (4_901_253_939, 1_859_523_328)]
)
def test_frames_against_the_engine(budget_bytes: int, arena_bytes: int) -> None:
    """Frames are what the engine made of these budgets (docs/benchmarks.json), within 5 % of the budget."""
    frames = forecast(case(budget_bytes)).resident_bytes
    assert abs(frames - arena_bytes) < 0.05 * budget_bytes


def test_the_whole_model_against_the_engine() -> None:
    """All is placed in VRAM from what the engine took for it (18150 MiB) on, within 3 %."""
    taken = 18_150 * 2**20

    def placement(budget_bytes: float) -> str:
        vram = forecast(case(int(budget_bytes))).plan.vram
        assert vram is not None
        return vram.placement

    assert placement(taken) == "paged"
    assert placement(1.03 * taken) == "all"


@pytest.mark.parametrize(
    ("busy", "hits", "tokens_per_s"),
    [(12, 0.153, 49.0), (12, 0.627, 92.4), (25, 0.808, 135), (51, 0.947, 202), (76, 0.988, 235)],
)
def test_speed_against_the_engine(busy: int, hits: float, tokens_per_s: float) -> None:
    """With that machine's bandwidths and hit rates the formula gives its decode speed within 10 %."""
    domains = {"code": skewed_map(busy, hits).domains["code"]}
    start = case(16 * GIB, router_map=replace(skewed_map(busy, hits), domains=domains))
    spare = forecast(start).resident_bytes - busy * 48 * 3 * SLAB
    found = forecast(replace(start, wanted=replace(start.wanted, vram_budget_bytes=16 * GIB - spare)))
    assert found.hits.mean == pytest.approx(hits, abs=0.01)
    assert found.tokens_per_s == pytest.approx(tokens_per_s, rel=0.1)


def test_the_formula() -> None:
    """``t = dense/bw + h B/bw + (1 - h) B/bw_miss``, with the terms named."""
    found = forecast(case(8 * GIB))
    experts = 8 * 48 * 3 * SLAB
    h = found.hits.mean
    reads = {read.what: (read.size_bytes, read.medium) for read in found.reads}
    assert reads["dense weights"] == (1_181_000_000, "vram")
    assert reads["resident experts"] == (pytest.approx(h * experts), "vram")
    assert reads["other experts"] == (pytest.approx((1 - h) * experts), "link")
    seconds = (1_181_000_000 + h * experts) / 4800e9 + (1 - h) * experts / 51e9
    assert found.limit_tokens_per_s == pytest.approx(1 / seconds)
    assert found.tokens_per_s == pytest.approx(1 / (seconds + 48 * 70e-6))


def test_where_vram_goes() -> None:
    """The parts of the budget add up to it; experts also lie in RAM, all of them."""
    found = forecast(case(8 * GIB))
    assert found.vram is not None
    parts = {part.name: part.size_bytes for part in found.vram.parts}
    assert parts["driver"] == DRIVER_BYTES and parts["reserve"] == ENGINE_RESERVE_BYTES
    assert parts["KV cache"] == 4096 * 2 * 48 * 512 * 2
    assert parts["staging"] == 2 * 128 * SLAB
    assert sum(parts.values()) + found.vram.free_bytes == 8 * GIB
    assert parts["experts"] == found.resident_bytes
    assert {part.name: part.size_bytes for part in found.ram.parts}["experts"] == LAYOUT.total_expert_bytes


def test_a_card_that_holds_everything() -> None:
    """With room for all, every pick is resident and nothing crosses the link."""
    found = forecast(case())
    assert found.hits.mean == found.resident_share == 1.0
    assert {read.medium for read in found.reads} == {"vram"}
    assert improvements(case()) == ()


def test_a_budget_that_the_context_exceeds_is_said() -> None:
    """What is over is a number, and a smaller context is named as the way out."""
    wanted = replace(case(4 * GIB).wanted, context=Context(131_072))
    over = replace(case(4 * GIB), wanted=wanted)
    found = forecast(over)
    assert found.vram is not None and found.vram.over_bytes > 8 * GIB
    assert "half the context: --ctx-size 65536" in [better.change for better in improvements(over)]


def test_hits_come_from_the_map() -> None:
    """The map says what the frames cover, by domain; without one any routing gives their share."""
    plain, mapped = forecast(case(8 * GIB)), forecast(case(8 * GIB, router_map=skewed_map(32, 0.9)))
    assert plain.resident_bytes == mapped.resident_bytes
    assert not plain.hits.from_map
    assert plain.hits.mean == pytest.approx(plain.resident_share)
    assert mapped.hits.from_map
    assert mapped.hits.least == pytest.approx(mapped.resident_share, abs=0.01)
    assert mapped.hits.most > 0.9
    assert mapped.hits.mean == pytest.approx((mapped.hits.least + mapped.hits.most) / 2)
    without = forecast(replace(case(8 * GIB, router_map=skewed_map(32, 0.9)), pager=False))
    assert not without.hits.from_map and without.hits.mean == pytest.approx(without.resident_share)


@pytest.mark.parametrize(
    ("budget_bytes", "layers_on_cpu"),
    [(3_270_508_544, 47), (4_901_253_939, 42), (9_793_490_124, 28), (13_054_980_915, 18)],
)
def test_the_split_against_stock(budget_bytes: int, layers_on_cpu: int) -> None:
    """Without the pager, as many layers' experts are in VRAM as were seen to fit (docs/benchmarks.json)."""
    found = forecast(replace(case(budget_bytes), pager=False))
    assert found.plan.vram is not None and found.plan.vram.layers_on_cpu == layers_on_cpu
    assert found.resident_share == pytest.approx((48 - layers_on_cpu) / 48)
    assert [read.medium for read in found.reads] == ["vram", "vram", "ram"]
    assert f"{48 - layers_on_cpu} of 48 layers" in found.plan.reason
    assert found.ram.parts[-1].size_bytes == found.plan.expert_bytes - found.resident_bytes


def test_without_a_gpu() -> None:
    """Dense weights, context and experts share the RAM; what is not resident comes from disk."""
    found = forecast(case(gpu=False, ram_budget=RamBudget(fraction=0.5)))
    assert found.vram is None
    assert found.resident_share == pytest.approx(0.5)
    assert [read.medium for read in found.reads] == ["ram", "ram", "disk"]
    assert found.tokens_per_s == found.limit_tokens_per_s
    changes = [better.change for better in improvements(case(gpu=False, ram_budget=RamBudget(fraction=0.5)))]
    assert set(changes) == {"all experts in RAM: leave --ram-budget out", "compute on the GPU: --gpu"}


@given(
    vram_mib=st.integers(0, 40_000),
    ram_mib=st.integers(0, 60_000),
    tokens=st.integers(16, 300_000),
    ram_share=st.none() | st.floats(0, 1),
    budget_mib=st.none() | st.integers(1024, 40_000),
    gpu=st.booleans(),
    pager=st.booleans(),
)
# A card that just does not hold the dense part.
@example(vram_mib=2200, ram_mib=60_000, tokens=4096, ram_share=None, budget_mib=None, gpu=False, pager=True)
def test_any_machine(
    vram_mib: int,
    ram_mib: int,
    tokens: int,
    ram_share: float | None,
    budget_mib: int | None,
    gpu: bool,
    pager: bool,
) -> None:
    """Whatever can be planned has a forecast whose numbers agree, and so has each change to it."""
    card = replace(CARD, vram_free_bytes=vram_mib << 20)
    machine = replace(MACHINE, ram_available_bytes=ram_mib << 20, gpus=(card,))
    wanted = Wanted(
        gpu,
        Context(tokens),
        None if ram_share is None else RamBudget(fraction=ram_share),
        budget_mib << 20 if gpu and budget_mib else None,
    )
    some = Case(LAYOUT, FOOTPRINT, machine, wanted, bandwidths(), None, pager=pager)
    try:
        found = forecast(some)
    except ConfigError:
        return
    assert 0 <= found.resident_share <= 1 and 0 <= found.hits.mean <= 1
    assert 0 < found.tokens_per_s <= found.limit_tokens_per_s
    read_bytes = sum(read.size_bytes for read in found.reads)
    assert read_bytes == pytest.approx(FOOTPRINT.read_bytes + 8 * 48 * 3 * SLAB)
    for memory in filter(None, (found.vram, found.ram)):
        assert all(part.size_bytes >= 0 for part in memory.parts)
        assert memory.free_bytes == 0 or memory.over_bytes == 0
    assert all(better.tokens_per_s > 0 for better in improvements(some))


def test_what_gives_more() -> None:
    """Changes are worth at least 5 %, and the best comes first."""
    start = case(6 * GIB)
    found = improvements(start)
    assert found[0].change.startswith("all experts in VRAM")
    assert [b.tokens_per_s for b in found] == sorted((b.tokens_per_s for b in found), reverse=True)
    assert all(better.tokens_per_s >= 1.05 * forecast(start).tokens_per_s for better in found)
    assert any(better.change.startswith("twice the VRAM: 12.0 GiB") for better in found)


def test_what_is_assumed_and_what_is_known() -> None:
    """The driver's clock, width and link stand for an assumption, and each number says where it is from."""
    known = assumed(replace(MACHINE, gpus=(replace(CARD, vram_bytes_per_s=1e12, link_bytes_per_s=32e9),)))
    assert (known.vram.bytes_per_s, known.link.bytes_per_s) == (0.85e12, 25.6e9)
    unknown = assumed(replace(MACHINE, gpus=()))
    assert unknown.vram.source.startswith("assumed") and unknown.link.source.startswith("assumed")
