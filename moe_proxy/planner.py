"""Owns how much memory the experts may take, with the reason in words. Pure arithmetic on records."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

from moe_proxy.errors import ConfigError
from moe_proxy.hardware import Hardware
from moe_proxy.model.layout import ModelLayout

_MIB = 2**20
_GIB = 2**30
_RESERVE_BYTES = 2 * _GIB
"""Left to the KV cache, compute buffers, the proxy and the rest of the machine when no budget is given."""

_UNITS = {"": 1, "K": 2**10, "M": _MIB, "G": _GIB, "T": 2**40}
_AMOUNT = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE | re.ASCII)
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)\s*%", re.ASCII)


@dataclass(frozen=True)
class RamBudget:
    """RAM for experts as it was asked for: an amount, or a share of all experts. One of them is set."""

    size_bytes: int | None = None
    fraction: float | None = None


@dataclass(frozen=True)
class Plan:
    """Bytes that resident experts may take, of ``expert_bytes`` that all experts have."""

    ram_budget_bytes: int
    expert_bytes: int
    experts_fit: bool
    reason: str


def parse_budget(text: str) -> RamBudget:
    """Read ``8G``, ``512M``, ``1.5GiB``, ``30%`` (of all experts) or bytes; units are powers of 1024.

    Raises ConfigError.
    """
    wanted = text.strip()
    if match := _PERCENT.fullmatch(wanted):
        percent = Decimal(match[1])
        if percent > 100:
            raise ConfigError(
                f"the RAM budget {text!r} is over 100 %", "give a share of the experts, as in 30%"
            )
        return RamBudget(fraction=float(percent / 100))
    if match := _AMOUNT.fullmatch(wanted):
        return RamBudget(size_bytes=int(Decimal(match[1]) * _UNITS[match[2].upper()]))
    raise ConfigError(
        f"the RAM budget {text!r} is no amount", "write it as 8G, 512M, 30% or a number of bytes"
    )


def plan(layout: ModelLayout, hardware: Hardware, ram_budget: RamBudget | None, gpu: bool) -> Plan:
    """How much RAM the experts of ``layout`` may take on ``hardware``.

    Without a budget: all experts if they fit beside the dense part (which a GPU holds in VRAM) and a reserve
    of 2 GiB, else what is left. A budget that was asked for is kept, up to all experts.
    """
    experts = layout.total_expert_bytes
    if ram_budget is not None:
        asked = (
            ram_budget.size_bytes
            if ram_budget.size_bytes is not None
            else int(experts * (ram_budget.fraction or 0.0))
        )
        budget = min(asked, experts)
        reason = f"{_size(budget)} of {_size(experts)} of experts, as asked"
        if asked > experts:
            reason = f"all {_size(experts)} of experts: less than the {_size(asked)} asked for"
        if budget > hardware.ram_available_bytes:
            reason += f"; only {_size(hardware.ram_available_bytes)} of RAM are available now"
        return Plan(budget, experts, budget >= experts, reason)
    dense = 0 if gpu else layout.dense_bytes
    left = max(hardware.ram_available_bytes - dense - _RESERVE_BYTES, 0)
    beside = f"beside the reserve of {_size(_RESERVE_BYTES)}"
    if dense:
        beside = f"beside {_size(dense)} of dense weights and the reserve of {_size(_RESERVE_BYTES)}"
    available = f"{_size(hardware.ram_available_bytes)} of available RAM"
    if experts <= left:
        return Plan(experts, experts, True, f"all {_size(experts)} of experts fit into {available} {beside}")
    reason = f"{_size(left)} of {_size(experts)} of experts: what {available} leaves {beside}"
    return Plan(left, experts, False, reason)


def _size(size_bytes: int) -> str:
    unit, name = (_GIB, "GiB") if size_bytes >= _GIB else (_MIB, "MiB")
    return f"{size_bytes / unit:.1f} {name}"
