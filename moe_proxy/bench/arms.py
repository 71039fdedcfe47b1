"""Owns which ways to serve a model are compared: the pager at each budget, and stock llama.cpp beside it.

Stock is the same build with the pager off. It starts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moe_proxy.config import Settings
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
        stock = _examined(settings, pager=False, vram_budget=budget)
        arms.append(Arm(f"pager {named}", "paged", budget, paged, f"stock {named}"))
        arms.append(Arm(f"stock {named}", "stock", budget, stock))
    return tuple(arms)


def _examined(settings: Settings, *, pager: bool = True, **budget: str | None) -> Served:
    return examine(settings.model_copy(update={"pager": pager, **budget}))
