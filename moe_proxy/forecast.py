"""Owns what a memory plan will come to: where memory goes, the hit rate, and tokens per second.

Pure arithmetic. Every number is an estimate from the header, the router map and bandwidths; what really
happened is for ``stats`` to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from moe_proxy.hardware import Hardware
from moe_proxy.model.footprint import Footprint
from moe_proxy.model.layout import ModelLayout
from moe_proxy.planner import (
    BATCH,
    DRIVER_BYTES,
    ENGINE_RESERVE_BYTES,
    PAGED_BATCH,
    Plan,
    Wanted,
    plan_of,
    split_bytes,
    split_of,
)
from moe_proxy.routing.map_facts import share_within
from moe_proxy.routing.router_map import RouterMap

Medium = Literal["vram", "link", "ram", "disk"]

_GB = 1e9
# Of what clock and width give, this much was reached where it was measured (docs/benchmarks.md).
_VRAM_REACHED = 0.85
_LINK_REACHED = 0.8
_WORTH_SAYING = 1.05


@dataclass(frozen=True)
class Rate:
    """Bytes per second, and where the number is from."""

    bytes_per_s: float
    source: str


@dataclass(frozen=True)
class Bandwidths:
    """How fast weights are read for a token: from VRAM, over the link to the GPU, from RAM, from disk.

    ``layer_overhead_s``: what a layer costs on a GPU beside reading (launching kernels, waiting for them).
    A calibration of the machine gives measured ones; ``assumed`` those for a machine without.
    """

    vram: Rate
    link: Rate
    ram: Rate
    disk: Rate
    layer_overhead_s: float

    def of(self, medium: Medium) -> Rate:
        """The rate of one medium."""
        rate: Rate = getattr(self, medium)
        return rate


def assumed(hardware: Hardware) -> Bandwidths:
    """Bandwidths from what the driver says of the GPU, and assumptions for the rest."""
    gpu = hardware.gpus[0] if hardware.gpus else None
    vram = Rate(300 * _GB, "assumed: a card of 8 to 12 GB")
    link = Rate(25 * _GB, "assumed: PCIe 4 x16")
    if gpu and gpu.vram_bytes_per_s:
        vram = Rate(gpu.vram_bytes_per_s * _VRAM_REACHED, "85 % of the card's memory clock times width")
    if gpu and gpu.link_bytes_per_s:
        link = Rate(gpu.link_bytes_per_s * _LINK_REACHED, "80 % of the PCIe generation times width")
    return Bandwidths(
        vram=vram,
        link=link,
        ram=Rate(min(40, 10 * hardware.cores_physical) * _GB, "assumed: 10 GB/s per core, 40 at most"),
        disk=Rate(2 * _GB, "assumed: an NVMe disk"),
        layer_overhead_s=70e-6,
    )


@dataclass(frozen=True)
class Part:
    """What one thing takes of a memory."""

    name: str
    size_bytes: int


@dataclass(frozen=True)
class Memory:
    """Where ``total_bytes`` go. What is over, when the parts exceed it, is ``over_bytes``."""

    total_bytes: int
    parts: tuple[Part, ...]

    @property
    def free_bytes(self) -> int:
        """What no part takes."""
        return max(self.total_bytes - sum(part.size_bytes for part in self.parts), 0)

    @property
    def over_bytes(self) -> int:
        """What the parts take beyond what is there."""
        return max(sum(part.size_bytes for part in self.parts) - self.total_bytes, 0)


@dataclass(frozen=True)
class HitRate:
    """Share of picks that find their expert resident: on average over domains, and of the extreme ones.

    Of the prior alone; ``from_map`` is False where there is none, and all experts count as equally likely,
    which is the least that any routing gives.
    """

    mean: float
    least: float
    most: float
    from_map: bool


@dataclass(frozen=True)
class Read:
    """What one token reads of one medium."""

    what: str
    size_bytes: float
    medium: Medium


@dataclass(frozen=True)
class Case:
    """A model, a machine, and what was asked for. ``batch``: tokens computed at once, None as planned."""

    layout: ModelLayout
    footprint: Footprint
    hardware: Hardware
    wanted: Wanted
    bandwidths: Bandwidths
    router_map: RouterMap | None
    pager: bool = True
    batch: int | None = None


@dataclass(frozen=True)
class Forecast:
    """What the plan of a case comes to.

    ``resident_bytes`` of experts are kept near the compute unit. ``tokens_per_s`` of one request at short
    context: what reading alone allows is ``limit_tokens_per_s``.
    """

    plan: Plan
    vram: Memory | None
    ram: Memory
    resident_bytes: int
    hits: HitRate
    reads: tuple[Read, ...]
    limit_tokens_per_s: float
    tokens_per_s: float

    @property
    def resident_share(self) -> float:
        """Share of the experts' bytes that is resident."""
        return self.resident_bytes / self.plan.expert_bytes


def forecast(case: Case) -> Forecast:
    """What ``case`` comes to. Raises ConfigError for what the machine cannot do."""
    plan = plan_of(case.layout, case.footprint, case.hardware, case.wanted)
    if not case.pager:
        plan = split_of(plan, case.layout, case.footprint, case.wanted.context)
    placement = _placement(plan)
    vram, frames = _vram(case, plan, placement) if plan.vram is not None else (None, 0)
    ram, held = _ram(case, plan, placement)
    resident = frames if placement in ("all", "paged", "split") else held
    hits = _hits(case, resident)
    reads = _reads(case, placement, hits.mean)
    seconds = sum(read.size_bytes / case.bandwidths.of(read.medium).bytes_per_s for read in reads)
    overhead = case.bandwidths.layer_overhead_s * len(case.layout.layers) if plan.vram else 0.0
    return Forecast(plan, vram, ram, resident, hits, reads, 1 / seconds, 1 / (seconds + overhead))


def _placement(plan: Plan) -> Literal["all", "paged", "split", "none", "cpu"]:
    if plan.vram is None:
        return "cpu"
    # Without the pager there are no frames: llama-server's --n-cpu-moe.
    return plan.vram.placement if plan.vram.layers_on_cpu is None else "split"


def _vram(case: Case, plan: Plan, placement: str) -> tuple[Memory, int]:
    """The parts of the VRAM budget, and the bytes of experts among them."""
    assert plan.vram is not None
    footprint, context = case.footprint, case.wanted.context
    batch = case.batch or (PAGED_BATCH if placement == "paged" else BATCH)
    parts = [
        Part("driver", DRIVER_BYTES),
        Part("dense weights", footprint.device_bytes),
        Part("KV cache", context.kv_bytes(footprint)),
        Part("compute buffers", footprint.compute_bytes(context.tokens, batch)),
    ]
    budget, experts = plan.vram.budget_bytes, 0
    if placement == "all":
        experts = plan.expert_bytes
    elif placement == "split":
        experts = split_bytes(case.layout, plan)
    elif placement == "paged":
        parts.append(Part("reserve", ENGINE_RESERVE_BYTES))
        left = Memory(budget, tuple(parts)).free_bytes
        # As the engine does it: two staging buffers if there is room for them, frames in what is left.
        if 2 * footprint.staged_bytes <= left:
            parts.append(Part("staging", 2 * footprint.staged_bytes))
        experts = min(Memory(budget, tuple(parts)).free_bytes, plan.expert_bytes)
    return Memory(budget, (*parts, Part("experts", experts))), experts


def _ram(case: Case, plan: Plan, placement: str) -> tuple[Memory, int]:
    """The parts of the RAM that is available, and the bytes of experts among them."""
    footprint, context = case.footprint, case.wanted.context
    parts = [Part("token embeddings", footprint.table_bytes)]
    if placement == "cpu":
        parts = [
            Part("dense weights", footprint.dense_bytes),
            Part("KV cache", context.kv_bytes(footprint)),
            Part("compute buffers", footprint.compute_bytes(context.tokens, case.batch or BATCH)),
        ]
    available = case.hardware.ram_available_bytes
    if placement == "all":
        experts = 0
    elif placement in ("paged", "split"):
        experts = plan.expert_bytes - split_bytes(case.layout, plan)
    else:
        experts = min(plan.ram_budget_bytes, Memory(available, tuple(parts)).free_bytes)
    return Memory(available, (*parts, Part("experts", experts))), experts


def _hits(case: Case, resident_bytes: int) -> HitRate:
    """Coverage of the best experts per byte that ``resident_bytes`` hold, each domain under its own prior."""
    expert_bytes = [case.layout.expert_bytes[layer] for layer in case.layout.layers]
    total = case.layout.total_expert_bytes
    if case.router_map is None or not case.router_map.domains or not case.pager:
        share = min(resident_bytes / total, 1.0)
        return HitRate(share, share, share, from_map=False)
    shares = [
        share_within(picks, expert_bytes, resident_bytes) for picks in case.router_map.pick_probabilities
    ]
    return HitRate(sum(shares) / len(shares), min(shares), max(shares), from_map=True)


def _reads(case: Case, placement: str, hit_rate: float) -> tuple[Read, ...]:
    """``dense/bw + h B/bw + (1 - h) B/bw_miss``: what each term reads, and from where."""
    layout = case.layout
    near: Medium = "ram" if placement == "cpu" else "vram"
    hit: Medium = "vram" if placement in ("all", "paged", "split") else "ram"
    miss: Medium = "link" if placement in ("all", "paged") else "ram" if placement == "split" else "disk"
    experts = layout.experts_used * sum(layout.expert_bytes.values())
    reads = (
        Read("dense weights", case.footprint.read_bytes, near),
        Read("resident experts", hit_rate * experts, hit),
        Read("other experts", (1 - hit_rate) * experts, miss),
    )
    return tuple(read for read in reads if read.size_bytes)


@dataclass(frozen=True)
class Improvement:
    """A change that gives more, and what it would give."""

    change: str
    hit_rate: float
    tokens_per_s: float


def improvements(case: Case) -> tuple[Improvement, ...]:
    """Changes that are worth at least 5 % more tokens per second, or make it fit; the best first."""
    now = forecast(case)
    over_bytes = now.vram.over_bytes if now.vram else 0
    found = [
        Improvement(change, then.hits.mean, then.tokens_per_s)
        for change, changed in _changes(case)
        if (then := forecast(changed)).tokens_per_s >= _WORTH_SAYING * now.tokens_per_s
        or (then.vram is not None and then.vram.over_bytes < over_bytes)
    ]
    return tuple(sorted(found, key=lambda improvement: -improvement.tokens_per_s))


def _changes(case: Case) -> Iterator[tuple[str, Case]]:
    """What one could change, and the case that it would make."""
    wanted, context = case.wanted, case.wanted.context
    plan = plan_of(case.layout, case.footprint, case.hardware, wanted)
    if not case.pager:
        yield "leave --no-pager out", replace(case, pager=True)
    if plan.vram is None:
        if case.hardware.gpus:
            changed = replace(case, wanted=replace(wanted, gpu=True))
            if case.hardware.gpus[0].vram_free_bytes > case.footprint.dense_bytes + 2 * DRIVER_BYTES:
                yield "compute on the GPU: --gpu", changed
        yield from _more_ram(case, plan)
        return
    if plan.vram.placement == "none":
        yield from _more_ram(case, plan)
    if plan.vram.placement == "paged":
        needed = case.footprint.dense_bytes + plan.expert_bytes + context.size_bytes(case.footprint)
        needed += DRIVER_BYTES + 2**20
        for size_bytes, what in (
            (2 * plan.vram.budget_bytes, "twice the VRAM"),
            (needed, "all experts in VRAM"),
        ):
            if size_bytes <= needed:
                yield f"{what}: {size_bytes / 2**30:.1f} GiB", _with_vram(case, size_bytes)
        if context.tokens >= 2 * 2048:
            half = replace(context, tokens=context.tokens // 2)
            asked = half.tokens // max(context.slots, 1)
            yield f"half the context: --ctx-size {asked}", replace(case, wanted=replace(wanted, context=half))
        if (context.key_type, context.value_type) == ("f16", "f16"):
            small = replace(context, key_type="q8_0", value_type="q8_0")
            yield (
                "a KV cache of half the size: -- -ctk q8_0 -ctv q8_0",
                replace(case, wanted=replace(wanted, context=small)),
            )


def _more_ram(case: Case, plan: Plan) -> Iterator[tuple[str, Case]]:
    if plan.experts_fit:
        return
    if case.wanted.ram_budget is not None:
        freed = replace(case, wanted=replace(case.wanted, ram_budget=None))
        if plan_of(freed.layout, freed.footprint, freed.hardware, freed.wanted).experts_fit:
            yield "all experts in RAM: leave --ram-budget out", freed
            return
    short = plan.expert_bytes - plan.ram_budget_bytes
    available = case.hardware.ram_available_bytes + short
    more = replace(case.hardware, ram_available_bytes=available)
    text = f"all experts in RAM: {available / 2**30:.1f} GiB of it available"
    yield text, replace(case, hardware=more, wanted=replace(case.wanted, ram_budget=None))


def _with_vram(case: Case, size_bytes: int) -> Case:
    """The case on a card that has so much free."""
    gpu = case.hardware.gpus[0]
    total = max(gpu.vram_total_bytes, size_bytes)
    card = replace(gpu, vram_total_bytes=total, vram_free_bytes=max(gpu.vram_free_bytes, size_bytes))
    return replace(
        case,
        hardware=replace(case.hardware, gpus=(card, *case.hardware.gpus[1:])),
        wanted=replace(case.wanted, vram_budget_bytes=size_bytes),
    )
