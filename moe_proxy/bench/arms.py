"""Owns which ways to serve a model are compared: the pager at each budget, and stock llama.cpp beside it.

Stock is the same build with the pager off. It starts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from moe_proxy.config import Settings
from moe_proxy.model.layout import ModelLayout
from moe_proxy.planner import DRIVER_BYTES
from moe_proxy.served import Served, examine


@dataclass(frozen=True)
class Arm:
    """One way to serve; ``against`` names the stock arm that a paged one is compared with."""

    name: str
    kind: Literal["paged", "stock"]
    budget: str | None
    served: Served
    against: str | None = None


def cpu_arms(settings: Settings, budgets: Sequence[str]) -> tuple[Arm, ...]:
    """The pager at each RAM budget, and one stock arm, to which budgets mean nothing.

    Raises as ``examine`` does.
    """
    stock = examine(settings.model_copy(update={"pager": False, "ram_budget": None}))
    paged = (
        Arm(f"pager {budget}", "paged", budget, _examined(settings, ram_budget=budget), "stock")
        for budget in budgets
    )
    return (*paged, Arm("stock", "stock", None, stock))


def gpu_arms(settings: Settings, budgets: Sequence[str | None]) -> tuple[Arm, ...]:
    """The pager and stock llama.cpp at each VRAM budget of the process; None: all that is free.

    Raises as ``examine`` does.
    """
    arms: list[Arm] = []
    for budget in budgets:
        named = budget or "all VRAM"
        paged = _examined(settings, vram_budget=budget)
        stock = at_equal_vram(replace(paged, settings=paged.settings.model_copy(update={"pager": False})))
        arms.append(Arm(f"pager {named}", "paged", budget, paged, f"stock {named}"))
        arms.append(Arm(f"stock {named}", "stock", budget, stock))
    return tuple(arms)


def _examined(settings: Settings, **budget: str | None) -> Served:
    return examine(settings.model_copy(update={"pager": True, **budget}))


def at_equal_vram(served: Served) -> Served:
    """``served`` with as many layers' experts in VRAM as its budget holds, for a start without the pager."""
    vram = served.plan.vram
    if vram is None or vram.placement == "all":
        return served
    beside = served.wanted.context.size_bytes(served.footprint) + DRIVER_BYTES
    layers = layers_on_cpu(served.layout, vram.budget_bytes - beside)
    return replace(served, plan=replace(served.plan, vram=replace(vram, layers_on_cpu=layers)))


def layers_on_cpu(layout: ModelLayout, weights_bytes: int) -> int:
    """How many of a model's first layers leave their experts to the CPU, if so many bytes hold the rest."""
    left = weights_bytes - layout.dense_bytes
    # llama.cpp counts layers from the first one, so those in VRAM are the last ones.
    for layer in reversed(layout.layers):
        left -= layout.experts * layout.expert_bytes[layer]
        if left < 0:
            return layer + 1
    return 0
