"""Owns what ``moe-proxy doctor`` makes of a machine: each finding with its level and its cure.

Pure: records come in, findings go out. Nothing here looks at the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moe_proxy.cli.units import bytes_text
from moe_proxy.hardware import Gpu, Hardware
from moe_proxy.model.gguf_header import GgufHeader
from moe_proxy.model.layout import ModelLayout
from moe_proxy.surroundings import Link, ReadSpeed, Surroundings

Level = Literal["ok", "warn", "fail"]

# CUDA 13's oldest; see its release notes.
_LEAST_CAPABILITY = (7, 5)
_LEAST_RAM_BYTES = 2 << 30
_SMALL_READ_BYTES = 16 << 20
_SLOW_DISK_BYTES_PER_S = 300e6


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: Level
    subject: str
    text: str
    cure: str = ""


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit; ``version`` as in "13.0", "" where it does not say."""

    nvcc: Path
    version: str


def memory(hardware: Hardware, around: Surroundings) -> Iterator[Finding]:
    """RAM, and what takes from it before anybody uses it."""
    free, total = hardware.ram_available_bytes, hardware.ram_total_bytes
    text = f"{bytes_text(free)} free of {bytes_text(total)}, {hardware.cores_physical} cores"
    if free < _LEAST_RAM_BYTES:
        yield Finding("warn", "memory", text, "end other programs: what experts get of it is little")
    else:
        yield Finding("ok", "memory", text)
    if around.container_bytes is not None and around.container_bytes < total:
        yield Finding(
            "warn",
            "container",
            f"this control group may use {bytes_text(around.container_bytes)} of the {bytes_text(total)}",
            "raise the container's memory limit, or name what experts may take with --ram-budget",
        )


def locking(hardware: Hardware) -> Finding:
    """How much memory may be locked."""
    limit = hardware.memlock_limit_bytes
    if limit is None:
        return Finding("ok", "memlock", "nothing limits how much memory may be locked")
    return Finding(
        "warn",
        "memlock",
        f"RLIMIT_MEMLOCK is {bytes_text(limit)}, so hot experts beyond it are read in but not locked",
        "raise it with: ulimit -l unlimited",
    )


def huge_pages(around: Surroundings) -> Iterator[Finding]:
    """Transparent huge pages, which the pinned experts ask for, and reserved ones, which nobody here uses."""
    reserved = around.reserved_huge_pages_bytes
    if around.huge_pages == "never":
        yield Finding(
            "warn",
            "huge pages",
            "transparent huge pages are off, so the CPU reads pinned experts more slowly",
            "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    elif around.huge_pages:
        yield Finding("ok", "huge pages", f"transparent huge pages: {around.huge_pages}")
    else:
        yield Finding("ok", "huge pages", "this kernel has no transparent huge pages")
    if reserved:
        yield Finding(
            "warn",
            "huge pages",
            f"{bytes_text(reserved)} of RAM are reserved as huge pages, which llama-server does not use",
            "as root: sysctl vm.nr_hugepages=0, unless another program needs them",
        )


def cards(
    hardware: Hardware, around: Surroundings, wanted: bool, toolkit: Toolkit | None, engine_is_there: bool
) -> Iterator[Finding]:
    """GPUs, their driver, toolkit and link; ``wanted``: the start computes on one."""
    worse: Level = "fail" if wanted else "warn"
    if not hardware.gpus:
        yield _no_gpu(around, wanted)
        return
    for gpu in hardware.gpus:
        yield _gpu(gpu, worse)
    yield _driver(around, toolkit, worse)
    yield _toolkit(toolkit, engine_is_there, worse)
    for link in around.links:
        yield _link(link)


def pinning(hardware: Hardware, around: Surroundings, expert_bytes: int) -> Finding:
    """Whether ``expert_bytes`` of pinned memory can be had; 0: of no model in particular."""
    if not around.wsl:
        return Finding("ok", "pinning", "only the RAM that is there limits pinned memory")
    half = hardware.ram_total_bytes // 2
    cure = "raise memory= under [wsl2] in %UserProfile%\\.wslconfig, then: wsl --shutdown"
    text = f"under WSL2 about half of the RAM can be pinned, {bytes_text(half)} here"
    if expert_bytes > half:
        return Finding(
            "fail", "pinning", f"{text}, and this model's experts are {bytes_text(expert_bytes)}", cure
        )
    return Finding("ok" if expert_bytes else "warn", "pinning", text, "" if expert_bytes else cure)


def model(header: GgufHeader, layout: ModelLayout) -> Finding:
    """What a GGUF is."""
    files = f" in {len(header.files)} files" if len(header.files) > 1 else ""
    return Finding(
        "ok",
        "model",
        f"{layout.name}: {layout.architecture}, {len(layout.layers)} MoE layers,"
        f" {layout.experts_used} of {layout.experts} experts for a token, {header.quantization},"
        f" {bytes_text(header.size_bytes)}{files}, {bytes_text(layout.total_expert_bytes)} of them experts",
    )


def disk(speed: ReadSpeed | None, model_bytes: int) -> Finding:
    """How fast the disk is; ``model_bytes``: what is loaded from it, 0 where no model was named."""
    if speed is None:
        return Finding(
            "ok", "disk", "its speed cannot be measured: no file to read, or no direct reads there"
        )
    if speed.read_bytes < _SMALL_READ_BYTES:
        return Finding("ok", "disk", f"its speed was not measured: {speed.path} is too small for that")
    per_s = speed.read_bytes / speed.seconds
    text = f"reads {bytes_text(int(per_s))} a second ({speed.path})"
    if model_bytes:
        text += (
            f", so this model takes {max(model_bytes / per_s, 1):.0f} s to load when nothing of it is cached"
        )
    if per_s < _SLOW_DISK_BYTES_PER_S:
        return Finding(
            "warn", "disk", text, "keep the model on a solid-state disk, above all if RAM is short"
        )
    return Finding("ok", "disk", text)


def _no_gpu(around: Surroundings, wanted: bool) -> Finding:
    if around.nvidia_cards:
        return Finding(
            "fail" if wanted else "warn",
            "gpu",
            f"an NVIDIA card is there ({', '.join(around.nvidia_cards)}), and no driver that answers",
            "install NVIDIA's driver until nvidia-smi shows the card; in a container: --gpus all",
        )
    if wanted:
        return Finding("fail", "gpu", "no NVIDIA GPU was found", "use --cpu, or see what nvidia-smi says")
    return Finding("ok", "gpu", "no NVIDIA GPU found; --cpu is the way here")


def _gpu(gpu: Gpu, worse: Level) -> Finding:
    text = (
        f"{gpu.name}, {bytes_text(gpu.vram_free_bytes)} free of {bytes_text(gpu.vram_total_bytes)},"
        f" compute capability {gpu.compute_capability or 'unknown'}"
    )
    if gpu.compute_capability and _numbers(gpu.compute_capability) < _LEAST_CAPABILITY:
        return Finding(worse, "gpu", text, "CUDA 13 needs 7.5 (RTX 20) or newer: use --cpu, or CUDA 12")
    return Finding("ok", "gpu", text)


def _driver(around: Surroundings, toolkit: Toolkit | None, worse: Level) -> Finding:
    if not around.driver:
        return Finding("warn", "driver", "it does not tell its version", "see what nvidia-smi says")
    text = f"{around.driver}, runs programs up to CUDA {around.driver_cuda}"
    # Within a major version an older driver runs what a newer toolkit made.
    if toolkit and toolkit.version and _numbers(toolkit.version)[0] > _numbers(around.driver_cuda)[0]:
        return Finding(
            worse,
            "driver",
            f"{text}, and the toolkit here makes programs for CUDA {toolkit.version}",
            "update the driver, or build with the toolkit of an older CUDA (CUDA_HOME)",
        )
    return Finding("ok", "driver", text)


def _toolkit(toolkit: Toolkit | None, engine_is_there: bool, worse: Level) -> Finding:
    if toolkit is not None:
        return Finding("ok", "toolkit", f"CUDA {toolkit.version or 'of unknown version'}, {toolkit.nvcc}")
    if engine_is_there:
        return Finding("ok", "toolkit", "no CUDA toolkit, and none needed: the engine is there")
    return Finding(
        worse,
        "toolkit",
        "no CUDA toolkit (nvcc) to build for the card with",
        "install it from https://developer.nvidia.com/cuda-downloads, or moe-proxy build --import an engine",
    )


def _link(link: Link) -> Finding:
    lanes = f"{link.lanes} of {link.most_lanes} lanes"
    text = f"PCIe generation {link.generation} of {link.most_generation}, {lanes}"
    if link.generation < link.most_generation:
        text += " (a card at rest lowers its generation)"
    if link.lanes < link.most_lanes:
        return Finding(
            "warn",
            "link",
            f"{text}: experts outside VRAM are read at {link.lanes / link.most_lanes:.0%} of what could be",
            "put the card into a slot with all lanes, without a riser; see the mainboard's manual",
        )
    return Finding("ok", "link", text)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit()) or (0,)
