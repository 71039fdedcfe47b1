"""Owns what a machine has around a plan's figures: driver, PCIe link, WSL, huge pages, limits, disk speed.

For reports alone: nothing is decided by it. A look never fails; what cannot be asked is absent.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

try:
    import pynvml
except ImportError:
    pynvml = None

logger = logging.getLogger(__name__)

_ROOT = Path("/")
_NVIDIA, _DISPLAY_CLASS = "0x10de", "0x03"
_BLOCK_BYTES = 4 << 20
_MOST_BYTES, _MOST_S = 256 << 20, 1.0


@dataclass(frozen=True)
class Link:
    """PCIe between a GPU and the rest: generation and lanes in use now, and those that card and slot allow.

    A card at rest lowers its generation, not its lanes.
    """

    gpu_index: int
    generation: int
    most_generation: int
    lanes: int
    most_lanes: int


@dataclass(frozen=True)
class Surroundings:
    """What was found.

    ``driver`` and ``driver_cuda`` ("13.0", the newest CUDA it runs) are "" without one. ``nvidia_cards`` are
    PCI addresses, with a driver or without. ``huge_pages`` is the kernel's mode, "" where it has none.
    ``container_bytes`` is the memory that a control group allows, None for no limit.
    """

    driver: str
    driver_cuda: str
    links: tuple[Link, ...]
    nvidia_cards: tuple[str, ...]
    wsl: bool
    huge_pages: str
    reserved_huge_pages_bytes: int
    container_bytes: int | None


@dataclass(frozen=True)
class ReadSpeed:
    """A stretch of a file that was read past the page cache."""

    path: Path
    read_bytes: int
    seconds: float


def look(root: Path = _ROOT) -> Surroundings:
    """Look around; ``root`` is where /proc and /sys lie."""
    driver, driver_cuda, links = _driver()
    return Surroundings(
        driver=driver,
        driver_cuda=driver_cuda,
        links=links,
        nvidia_cards=_nvidia_cards(root),
        wsl="microsoft" in _text(root / "proc/sys/kernel/osrelease").lower(),
        huge_pages=_chosen(_text(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        reserved_huge_pages_bytes=_reserved_bytes(_text(root / "proc/meminfo")),
        container_bytes=_container_bytes(root),
    )


def read_speed(
    path: Path,
    *,
    clock: Callable[[], float] = time.perf_counter,
    flags: int | None = None,
) -> ReadSpeed | None:
    """Read the beginning of ``path`` from its disk, 256 MiB or one second at most; None where that cannot be.

    Direct reads, since the page cache would answer for the disk; not every file system has them. ``flags``
    are open(2)'s in their place.
    """
    how = getattr(os, "O_DIRECT", None) if flags is None else flags
    if how is None:
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | how)
    except OSError as error:
        logger.debug("no direct reads of %s: %s", path, error)
        return None
    try:
        # Direct reads want aligned memory, which an anonymous mapping is.
        with mmap.mmap(-1, _BLOCK_BYTES) as block:
            done_bytes, began_s = 0, clock()
            while True:
                count = os.preadv(descriptor, [block], done_bytes)
                done_bytes += count
                took_s = clock() - began_s
                if count < _BLOCK_BYTES or done_bytes >= _MOST_BYTES or took_s >= _MOST_S:
                    break
    except OSError as error:
        logger.debug("no direct reads of %s: %s", path, error)
        return None
    finally:
        os.close(descriptor)
    return ReadSpeed(path, done_bytes, took_s) if done_bytes and took_s > 0 else None


def _driver() -> tuple[str, str, tuple[Link, ...]]:
    if pynvml is None:
        return "", "", ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        logger.debug("no NVIDIA driver: %s", error)
        return "", "", ()
    try:
        version = pynvml.nvmlSystemGetDriverVersion()
        text = version.decode(errors="replace") if isinstance(version, bytes) else str(version)
        cuda = int(pynvml.nvmlSystemGetCudaDriverVersion())
        count = pynvml.nvmlDeviceGetCount()
        links = tuple(link for index in range(count) if (link := _link(index)) is not None)
        return text, f"{cuda // 1000}.{cuda % 1000 // 10}", links
    except pynvml.NVMLError as error:
        logger.debug("the NVIDIA driver does not answer: %s", error)
        return "", "", ()
    finally:
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError as error:
            logger.debug("the NVIDIA library does not close: %s", error)


def _link(index: int) -> Link | None:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        return Link(
            index,
            pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
            pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
            pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
            pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
        )
    except pynvml.NVMLError as error:
        logger.debug("GPU %d does not tell its link: %s", index, error)
        return None


def _nvidia_cards(root: Path) -> tuple[str, ...]:
    return tuple(
        sorted(
            device.name
            for device in root.glob("sys/bus/pci/devices/*")
            if _text(device / "vendor").strip() == _NVIDIA
            and _text(device / "class").startswith(_DISPLAY_CLASS)
        )
    )


def _chosen(text: str) -> str:
    """The word in brackets: "always [madvise] never"."""
    return text.partition("[")[2].partition("]")[0]


def _reserved_bytes(meminfo: str) -> int:
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        if name == "Hugetlb":
            digits = value.split()
            return int(digits[0]) * 1024 if digits and digits[0].isdigit() else 0
    return 0


def _container_bytes(root: Path) -> int | None:
    for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _text(root / name).strip()
        # Version 1 writes "no limit" as the largest number of whole pages.
        if text.isdigit() and int(text) < 2**60:
            return int(text)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        logger.debug("%s: %s", path, error)
        return ""
