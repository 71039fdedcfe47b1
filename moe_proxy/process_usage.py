"""Owns what one process uses of the machine: memory, VRAM, the disk. The only probe of that.

A probe never fails. What cannot be asked is reported as absent.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass

import psutil
import pynvml

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Usage:
    """What a process holds now, and what it has read from disks since it began; None: nobody says.

    ``rss_bytes`` counts pages of mapped files that are in memory. ``read_bytes`` is what storage delivered
    for it, page faults included; what the page cache had is not in it. ``vram_bytes`` is that of all GPUs.
    """

    rss_bytes: int | None
    read_bytes: int | None
    vram_bytes: int | None


def usage_of(pid: int) -> Usage:
    """Ask the operating system and the NVIDIA driver. A process that is gone uses nothing that is known."""
    rss = read = None
    try:
        process = psutil.Process(pid)
        rss = int(process.memory_info().rss)
        read = int(process.io_counters().read_bytes)
    except (
        psutil.Error,
        OSError,
        AttributeError,
    ) as error:  # gone, of somebody else, or no such counters here
        logger.debug("process %d cannot be looked at: %s", pid, error)
    return Usage(rss, read, _vram_bytes(pid))


def _vram_bytes(pid: int) -> int | None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        cards = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        used = [
            int(process.usedGpuMemory)
            for card in cards
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(card)
            if process.pid == pid and process.usedGpuMemory is not None
        ]
    except pynvml.NVMLError as error:
        logger.debug("the NVIDIA driver does not say what process %d uses: %s", pid, error)
        return None
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return sum(used) if used else None
