"""The planner: how much RAM experts may take, with the reason in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_proxy.errors import ConfigError
from moe_proxy.hardware import Gpu, Hardware
from moe_proxy.model.layout import ModelLayout
from moe_proxy.planner import RamBudget, VramPlan, parse_budget, parse_vram_budget, plan, plan_gpu

GIB = 2**30
LAYOUT = ModelLayout("qwen3moe", "m", (0, 1), 8, 2, {0: GIB // 2, 1: GIB // 2}, 3 * GIB, "ab" * 32)
EXPERTS = 8 * GIB


def machine(available_gib: float) -> Hardware:
    """A machine with that much free RAM."""
    return Hardware(64 * GIB, int(available_gib * GIB), 8, None, ())


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("8G", RamBudget(size_bytes=8 * GIB)),
        ("8g", RamBudget(size_bytes=8 * GIB)),
        (" 8 GB ", RamBudget(size_bytes=8 * GIB)),
        ("1.5GiB", RamBudget(size_bytes=3 * GIB // 2)),
        ("512M", RamBudget(size_bytes=512 * 2**20)),
        ("1T", RamBudget(size_bytes=2**40)),
        ("4096", RamBudget(size_bytes=4096)),
        ("0", RamBudget(size_bytes=0)),
        ("30%", RamBudget(fraction=0.3)),
        ("12.5 %", RamBudget(fraction=0.125)),
        ("100%", RamBudget(fraction=1.0)),
    ],
)
def test_budgets(text: str, budget: RamBudget) -> None:
    """A budget is an amount in powers of 1024, a share of all experts, or bytes."""
    assert parse_budget(text) == budget


@pytest.mark.parametrize(
    "text", ["", "G", "-1", "8X", "8GG", "1e9", "nan", "101%", "-3%", "%", "8 G B", "٣G", "9" * 30]
)
def test_what_is_no_budget(text: str) -> None:
    """What is no amount is refused with the value and an example."""
    with pytest.raises(ConfigError) as caught:
        parse_budget(text)
    assert repr(text) in str(caught.value)
    assert "30%" in str(caught.value)


@given(st.text())
def test_no_text_raises_anything_else(text: str) -> None:
    """Any text is a budget or a ConfigError."""
    try:
        budget = parse_budget(text)
    except ConfigError:
        return
    assert (budget.size_bytes is None) != (budget.fraction is None)


def test_everything_fits() -> None:
    """Default: all experts if they fit into available RAM less the dense part less 2 GiB."""
    chosen = plan(LAYOUT, machine(13), None)
    assert (chosen.ram_budget_bytes, chosen.expert_bytes, chosen.experts_fit) == (EXPERTS, EXPERTS, True)
    assert "all 8.0 GiB of experts fit into 13.0 GiB" in chosen.reason


def test_what_is_left() -> None:
    """Else what is left, and never less than nothing."""
    chosen = plan(LAYOUT, machine(12), None)
    assert (chosen.ram_budget_bytes, chosen.experts_fit) == (7 * GIB, False)
    assert "7.0 GiB of 8.0 GiB" in chosen.reason
    assert plan(LAYOUT, machine(1), None).ram_budget_bytes == 0


def test_a_gpu_holds_the_dense_part() -> None:
    """With a GPU the dense weights take no RAM."""
    assert plan(LAYOUT, machine(10), None, dense_in_ram=False).experts_fit
    assert not plan(LAYOUT, machine(10), None).experts_fit


def test_a_budget_that_was_asked_for() -> None:
    """A budget is kept as it was asked for, up to all experts; the reason warns where RAM is short."""
    chosen = plan(LAYOUT, machine(32), parse_budget("30%"))
    assert chosen.ram_budget_bytes == int(0.3 * EXPERTS)
    assert "as asked" in chosen.reason
    assert plan(LAYOUT, machine(32), parse_budget("0")).ram_budget_bytes == 0
    assert plan(LAYOUT, machine(32), parse_budget("99G")).ram_budget_bytes == EXPERTS
    assert "only 4.0 GiB of RAM are available" in plan(LAYOUT, machine(4), parse_budget("8G")).reason


def card(total_gib: float, free_gib: float, ram_gib: float) -> Hardware:
    """A machine with one GPU."""
    gpu = Gpu(0, "NVIDIA Card", int(total_gib * GIB), int(free_gib * GIB), "8.6")
    return Hardware(64 * GIB, int(ram_gib * GIB), 8, None, (gpu,))


def test_a_card_that_holds_everything_holds_everything() -> None:
    """Where all experts fit beside the dense part and the context, the pager only counts."""
    chosen = plan_gpu(LAYOUT, card(24, 23, 32), None, None, GIB)
    assert chosen.vram == VramPlan("all", 23 * GIB - GIB // 2, GIB)
    assert "all 8.0 GiB of experts fit" in chosen.reason


def test_a_smaller_card_pages() -> None:
    """Hot experts live in VRAM, all of them in pinned RAM; the budget is of the whole process."""
    chosen = plan_gpu(LAYOUT, card(12, 11, 32), None, parse_vram_budget("8G"), GIB)
    assert chosen.vram == VramPlan("paged", 8 * GIB, GIB)
    assert chosen.ram_budget_bytes == chosen.expert_bytes == EXPERTS
    assert "pinned RAM" in chosen.reason and "8.0 GiB of VRAM" in chosen.reason


def test_without_ram_to_pin_the_cpu_computes_the_experts() -> None:
    """A model larger than RAM is not pinned: its experts stay pages of the file, under the RAM budget."""
    chosen = plan_gpu(LAYOUT, card(12, 11, 6), None, None, GIB)
    assert chosen.vram is not None and chosen.vram.placement == "none"
    assert chosen.ram_budget_bytes == 4 * GIB
    assert "the CPU computes them" in chosen.reason


@pytest.mark.parametrize(
    ("vram_budget", "free_gib", "said"),
    [("8G", 7, "7.0 GiB of NVIDIA Card are free"), ("2G", 11, "takes 3.0 GiB, more than 2.0 GiB of VRAM")],
)
def test_a_budget_that_cannot_be_is_refused(vram_budget: str, free_gib: float, said: str) -> None:
    """An occupied GPU and a budget below the dense weights: what is wrong, with which value, what to do."""
    with pytest.raises(ConfigError) as caught:
        plan_gpu(LAYOUT, card(12, free_gib, 32), None, parse_vram_budget(vram_budget), GIB)
    assert said in str(caught.value)
    assert "--vram-budget" in str(caught.value)


@pytest.mark.parametrize("text", ["30%", "0", "512M", "much"])
def test_what_is_no_vram_budget(text: str) -> None:
    """VRAM is an amount that can hold a context; a share of the experts says nothing about the process."""
    with pytest.raises(ConfigError, match=text):
        parse_vram_budget(text)
