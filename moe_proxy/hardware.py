"""Owns what this machine has: memory, cores, NVIDIA GPUs. The only probe of them; it plans nothing.

A probe never fails. What cannot be asked is reported as absent.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

pynvml: Any = None
with suppress(OSError):
    # Without a driver, the binding could only say so, and takes as much memory as a classifier.
    ctypes.CDLL("libnvidia-ml.so.1")
    pynvml = import_module("pynvml")

logger = logging.getLogger(__name__)

_UNLIMITED_BYTES = 2**63 - 1
_PROCESS = Path("/proc/self/status")
# Position of CAP_IPC_LOCK in the sets of /proc/PID/status; see capabilities(7).
_CAP_IPC_LOCK = 14
# One lane of PCIe, by generation, after its line code.
_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU; ``compute_capability`` is "9.0", or "" where the driver does not say.

    ``vram_bytes_per_s`` and ``link_bytes_per_s`` are what clock, width and PCIe generation give at most; 0
    where the driver does not say.
    """

    index: int
    name: str
    vram_total_bytes: int
    vram_free_bytes: int
    compute_capability: str
    vram_bytes_per_s: float = 0.0
    link_bytes_per_s: float = 0.0


@dataclass(frozen=True)
class Hardware:
    """What a plan may count on.

    ``cores_physical`` is what this process may use of them. ``memlock_limit_bytes`` is None where there is
    no limit, none that holds for us, or no answer.
    """

    ram_total_bytes: int
    ram_available_bytes: int
    cores_physical: int
    memlock_limit_bytes: int | None
    gpus: tuple[Gpu, ...]


def probe() -> Hardware:
    """Ask the operating system and the NVIDIA driver."""
    memory = psutil.virtual_memory()
    return Hardware(
        ram_total_bytes=int(memory.total),
        ram_available_bytes=int(memory.available),
        cores_physical=_cores_physical(),
        memlock_limit_bytes=_memlock_limit_bytes(),
        gpus=_gpus(),
    )


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name; its architecture where the system does not say more."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model") and value.strip():
            return value.strip()
    return platform.machine()


def _cores_physical() -> int:
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if sys.platform == "linux":
        # A container or taskset may allow fewer.
        return min(cores, len(os.sched_getaffinity(0)))
    return cores


def _memlock_limit_bytes() -> int | None:
    if sys.platform == "win32":
        return None
    if _may_lock_without_limit():
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY or soft >= _UNLIMITED_BYTES else soft


def _may_lock_without_limit() -> bool:
    """Whether a program that this process runs has CAP_IPC_LOCK, to which RLIMIT_MEMLOCK does not apply.

    By capabilities(7), root's programs get the bounding set, other users' the ambient one.
    """
    wanted = "CapBnd" if os.geteuid() == 0 else "CapAmb"
    try:
        lines = _PROCESS.read_text(encoding="ascii").splitlines()
        sets = dict(line.split(":\t", 1) for line in lines if line.startswith("Cap"))
        return bool(int(sets[wanted], 16) >> _CAP_IPC_LOCK & 1)
    except (OSError, ValueError, KeyError) as error:
        logger.debug("no capabilities in %s: %s", _PROCESS, error)
        return False


def _gpus() -> tuple[Gpu, ...]:
    if pynvml is None:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:  # no driver, no device
        logger.debug("no NVIDIA GPU: %s", error)
        return ()
    try:
        return tuple(gpu for index in range(pynvml.nvmlDeviceGetCount()) if (gpu := _gpu(index)) is not None)
    except pynvml.NVMLError as error:
        logger.debug("the NVIDIA driver does not count its GPUs: %s", error)
        return ()
    finally:
        _shut_down()


def _gpu(index: int) -> Gpu | None:
    """One GPU, or None where the driver refuses the questions that matter (a lost device)."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        name = pynvml.nvmlDeviceGetName(handle)
        total_bytes, free_bytes = _memory(handle)
    except pynvml.NVMLError as error:
        logger.debug("GPU %d does not answer: %s", index, error)
        return None
    try:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    except pynvml.NVMLError:
        capability = ""
    else:
        capability = f"{major}.{minor}"
    text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    return Gpu(
        index,
        text,
        total_bytes,
        free_bytes,
        capability,
        vram_bytes_per_s=_vram_bytes_per_s(handle),
        link_bytes_per_s=_link_bytes_per_s(handle),
    )


def _memory(handle: object) -> tuple[int, int]:
    """Bytes that processes may have, and those that none has: what nvidia-smi counts.

    The first form of the question counts what the driver keeps for itself as used: half a gigabyte on some
    cards.
    """
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError as error:  # a driver before 510
        logger.debug("no second form of memory information: %s", error)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return int(memory.total), int(memory.free)
    return int(memory.total - memory.reserved), int(memory.free)


def _vram_bytes_per_s(handle: object) -> float:
    """Memory clock times bus width, two transfers a clock; 0 where the driver does not say."""
    try:
        clock_mhz = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_MEM)
        bits = pynvml.nvmlDeviceGetMemoryBusWidth(handle)
    except pynvml.NVMLError as error:
        logger.debug("no memory clock: %s", error)
        return 0.0
    return float(2 * clock_mhz * 1e6 * bits / 8)


def _link_bytes_per_s(handle: object) -> float:
    """PCIe generation times lanes, as card and slot allow; 0 where the driver does not say."""
    try:
        generation = pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
        lanes = pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
    except pynvml.NVMLError as error:
        logger.debug("no PCIe link: %s", error)
        return 0.0
    return float(_LANE_BYTES_PER_S.get(generation, 0.0) * lanes)


def _shut_down() -> None:
    try:
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        logger.debug("the NVIDIA library does not close: %s", error)
