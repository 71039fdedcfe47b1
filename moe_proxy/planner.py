"""Owns where the experts live and how much memory they may take, with the reason. Pure arithmetic."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Literal

from moe_proxy.errors import ConfigError
from moe_proxy.hardware import Hardware
from moe_proxy.model.footprint import Footprint
from moe_proxy.model.layout import ModelLayout

_MIB = 2**20
_GIB = 2**30
_RESERVE_BYTES = 2 * _GIB
"""Left to the context, the proxy and the rest of the machine when no budget is given; more for a context that
leaves less than _REST_BYTES of it to the others."""
_REST_BYTES = _GIB

_VRAM_SPARE_BYTES = _GIB // 2
"""Left of the free VRAM to the desktop and other programs when no budget is given."""
DRIVER_BYTES = _GIB // 2
"""What the driver takes for a process that computes; an estimate, cards differ."""
ENGINE_RESERVE_BYTES = _GIB // 4
"""What the engine leaves free of its VRAM budget for what is taken while it computes."""
SEQUENCES = 4
"""Slots that llama-server makes unless told otherwise; they share one context."""
BATCH = 512
"""Tokens of a prompt that llama-server computes at once, unless told otherwise."""
PAGED_BATCH = 2048
"""The same with experts in frames: each such batch reads every expert over the link."""
_VRAM_LEAST_BYTES = _GIB

_UNITS = {"": 1, "K": 2**10, "M": _MIB, "G": _GIB, "T": 2**40}
_AMOUNT = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE | re.ASCII)
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)\s*%", re.ASCII)


@dataclass(frozen=True)
class RamBudget:
    """RAM for experts as it was asked for: an amount, or a share of all experts. One of them is set."""

    size_bytes: int | None = None
    fraction: float | None = None


@dataclass(frozen=True)
class VramPlan:
    """What a GPU holds beside the dense weights.

    ``budget_bytes`` is VRAM of the whole engine process, ``others_bytes`` what other processes use now.
    ``placement``: "all" experts in VRAM for good; "paged": the hot ones, with all in pinned RAM; "none".
    ``layers_on_cpu``: without a pager, the first so many layers leave their experts to the CPU; None: all do.
    """

    placement: Literal["all", "paged", "none"]
    budget_bytes: int
    others_bytes: int
    layers_on_cpu: int | None = None


@dataclass(frozen=True)
class Context:
    """The context that is served: ``tokens`` in all ``slots`` together, and the types of its KV cache.

    ``sequences`` of them may run at once: each has a recurrent state, where a model keeps one.
    """

    tokens: int
    slots: int = 1
    key_type: str = "f16"
    value_type: str = "f16"
    sequences: int = SEQUENCES

    def kv_bytes(self, footprint: Footprint) -> int:
        """KV cache and recurrent state. Raises ConfigError for a type."""
        return footprint.kv_bytes(self.tokens, self.key_type, self.value_type, self.sequences)

    def size_bytes(self, footprint: Footprint, batch: int = BATCH) -> int:
        """All that it takes beside the weights: KV cache, recurrent state, compute buffers."""
        return self.kv_bytes(footprint) + footprint.compute_bytes(self.tokens, batch)


@dataclass(frozen=True)
class Wanted:
    """What was asked for; None for a budget leaves it to the planner."""

    gpu: bool
    context: Context
    ram_budget: RamBudget | None = None
    vram_budget_bytes: int | None = None


@dataclass(frozen=True)
class Plan:
    """Bytes that resident experts may take, of ``expert_bytes`` that all experts have.

    ``vram`` says what a GPU holds of them; None without a GPU.
    """

    ram_budget_bytes: int
    expert_bytes: int
    experts_fit: bool
    reason: str
    vram: VramPlan | None = None


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


def parse_vram_budget(text: str) -> int:
    """Read ``8G``, ``512M`` or bytes of VRAM of the whole process. Raises ConfigError."""
    budget = parse_budget(text)
    if budget.size_bytes is None or budget.size_bytes < _VRAM_LEAST_BYTES:
        raise ConfigError(
            f"the VRAM budget {text!r} is no amount of at least {_size(_VRAM_LEAST_BYTES)}",
            "write what llama-server may take of the card, weights and context included: 8G",
        )
    return budget.size_bytes


def plan_of(layout: ModelLayout, footprint: Footprint, hardware: Hardware, wanted: Wanted) -> Plan:
    """Where the experts live, as ``wanted``. Raises ConfigError for what this machine cannot do."""
    context_bytes = wanted.context.size_bytes(footprint)
    if not wanted.gpu:
        if wanted.vram_budget_bytes is not None:
            raise ConfigError(
                "a VRAM budget needs a GPU", "start with --gpu as well, or leave --vram-budget out"
            )
        return plan(layout, hardware, wanted.ram_budget, context_bytes)
    if not hardware.gpus:
        raise ConfigError("no NVIDIA GPU was found", "start with --cpu, or see what nvidia-smi says")
    return plan_gpu(layout, hardware, wanted.ram_budget, wanted.vram_budget_bytes, context_bytes)


def split_of(chosen: Plan, layout: ModelLayout, footprint: Footprint, context: Context) -> Plan:
    """``chosen`` for a start without the pager: the experts of as many layers in VRAM as its budget holds."""
    vram = chosen.vram
    if vram is None or vram.placement != "paged":
        return chosen
    weights_bytes = vram.budget_bytes - context.size_bytes(footprint) - DRIVER_BYTES
    first = layers_on_cpu(layout, weights_bytes)
    held = sum(layer >= first for layer in layout.layers)
    reason = (
        f"the experts of {held} of {len(layout.layers)} layers fit into {_size(vram.budget_bytes)} of VRAM,"
        " the CPU computes the others"
    )
    return replace(chosen, reason=reason, vram=replace(vram, layers_on_cpu=first))


def split_bytes(layout: ModelLayout, chosen: Plan) -> int:
    """Bytes of the experts in VRAM when whole layers are, by ``split_of``."""
    first = chosen.vram.layers_on_cpu if chosen.vram is not None else None
    sizes = layout.expert_bytes.items()
    return layout.experts * sum(size for layer, size in sizes if first is not None and layer >= first)


def layers_on_cpu(layout: ModelLayout, weights_bytes: int) -> int:
    """How many of a model's first layers leave their experts to the CPU, if so many bytes hold the rest."""
    left = weights_bytes - layout.dense_bytes
    # llama.cpp counts layers from the first one, so those in VRAM are the last ones.
    for layer in reversed(layout.layers):
        left -= layout.experts * layout.expert_bytes[layer]
        if left < 0:
            return layer + 1
    return 0


def plan_gpu(
    layout: ModelLayout,
    hardware: Hardware,
    ram_budget: RamBudget | None,
    vram_budget_bytes: int | None,
    context_bytes: int,
) -> Plan:
    """Where the experts of ``layout`` live when the first GPU of ``hardware`` computes them.

    Without a budget the process may take what is free of the card but half a GiB. Raises ConfigError when the
    dense part alone takes more than the budget.
    """
    gpu = hardware.gpus[0]
    others = gpu.vram_total_bytes - gpu.vram_free_bytes
    budget = vram_budget_bytes or gpu.vram_free_bytes - _VRAM_SPARE_BYTES
    experts = layout.total_expert_bytes
    vram = f"{_size(budget)} of VRAM"
    if budget > gpu.vram_free_bytes:
        raise ConfigError(
            f"{vram} were asked for, {_size(gpu.vram_free_bytes)} of {gpu.name} are free",
            "lower --vram-budget or end what uses the card (nvidia-smi shows it)",
        )
    if budget < layout.dense_bytes:
        raise ConfigError(
            f"{layout.name} without its experts takes {_size(layout.dense_bytes)}, more than {vram}",
            "raise --vram-budget, or start with --cpu",
        )
    if layout.dense_bytes + experts + context_bytes + DRIVER_BYTES <= budget:
        reason = f"all {_size(experts)} of experts fit into {vram} beside the dense weights and the context"
        return Plan(experts, experts, True, reason, VramPlan("all", budget, others))
    in_ram = plan(layout, hardware, ram_budget, dense_in_ram=False)  # nor is the context
    if not in_ram.experts_fit:
        reason = f"{in_ram.reason}; too little RAM to pin all experts, so the CPU computes them"
        return replace(in_ram, reason=reason, vram=VramPlan("none", budget, others))
    reason = (
        f"all {_size(experts)} of experts in pinned RAM, the hot ones in what the context leaves of {vram}"
    )
    return Plan(experts, experts, True, reason, VramPlan("paged", budget, others))


def plan(
    layout: ModelLayout,
    hardware: Hardware,
    ram_budget: RamBudget | None,
    context_bytes: int = 0,
    dense_in_ram: bool = True,
) -> Plan:
    """How much RAM the experts of ``layout`` may take on ``hardware``.

    Without a budget: all experts if they fit beside the dense part (unless a GPU holds that) and a reserve
    of 2 GiB (or the context and 1 GiB, if that is more), else what is left. A budget that was asked for is
    kept, up to all experts.
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
    dense = layout.dense_bytes if dense_in_ram else 0
    reserve = max(_RESERVE_BYTES, context_bytes + _REST_BYTES)
    left = max(hardware.ram_available_bytes - dense - reserve, 0)
    beside = f"beside the reserve of {_size(reserve)}"
    if dense:
        beside = f"beside {_size(dense)} of dense weights and the reserve of {_size(reserve)}"
    available = f"{_size(hardware.ram_available_bytes)} of available RAM"
    if experts <= left:
        return Plan(experts, experts, True, f"all {_size(experts)} of experts fit into {available} {beside}")
    reason = f"{_size(left)} of {_size(experts)} of experts: what {available} leaves {beside}"
    return Plan(left, experts, False, reason)


def _size(size_bytes: int) -> str:
    unit, name = (_GIB, "GiB") if size_bytes >= _GIB else (_MIB, "MiB")
    return f"{size_bytes / unit:.1f} {name}"
