"""The probe: what the machine has, and never an exception."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from moe_proxy import hardware


class Driver:
    """An NVIDIA driver with two GPUs; calls named in ``broken`` raise what the library raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *broken: str) -> None:
        self.closed = 0
        answers = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": self._close,
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda handle: b"Card 0" if handle == 0 else "Card 1",
            "nvmlDeviceGetMemoryInfo": self._memory,
            "nvmlDeviceGetCudaComputeCapability": lambda handle: (8, handle),
            "nvmlDeviceGetMaxClockInfo": lambda handle, kind: 7501,
            "nvmlDeviceGetMemoryBusWidth": lambda handle: 192,
            "nvmlDeviceGetMaxPcieLinkGeneration": lambda handle: 4,
            "nvmlDeviceGetMaxPcieLinkWidth": lambda handle: 16,
        }
        self._old = "memory_v2" in broken
        # Where there is no driver, the binding is not even loaded.
        monkeypatch.setattr(hardware, "pynvml", pynvml)
        for name, answer in answers.items():
            monkeypatch.setattr(pynvml, name, self._raise if name in broken else answer)

    def _memory(self, handle: int, version: int | None = None) -> SimpleNamespace:
        if version is None:
            return SimpleNamespace(total=8 * 2**30, free=6 * 2**30)
        if self._old:
            self._raise()
        return SimpleNamespace(total=8 * 2**30, reserved=2**29, free=6 * 2**30)

    def _close(self) -> None:
        self.closed += 1

    def _raise(self, *arguments: object, **named: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)


def test_memory_and_cores() -> None:
    """RAM, physical cores and the limit on locked memory of this very machine."""
    found = hardware.probe()
    assert found.ram_total_bytes >= found.ram_available_bytes > 0
    assert 1 <= found.cores_physical <= (os.cpu_count() or 1)
    assert found.memlock_limit_bytes is None or found.memlock_limit_bytes >= 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which CPUs a process may use")
def test_cores_that_may_not_be_used_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container or under taskset, no more cores than were allowed."""
    monkeypatch.setattr(hardware.psutil, "cpu_count", lambda logical: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5})
    assert hardware.probe().cores_physical == 3


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs with name, memory, compute capability and bandwidths; the library is closed again.

    What the driver keeps for itself is no part of the memory, as for nvidia-smi: a budget is compared with
    that.

    The clock and width are those of an RTX 3060, of which 360 GB/s are published, on PCIe 4 x16.
    """
    driver = Driver(monkeypatch)
    speeds = (2 * 7501e6 * 192 / 8, 16 * 1.969e9)
    assert hardware.probe().gpus == (
        hardware.Gpu(0, "Card 0", 8 * 2**30 - 2**29, 6 * 2**30, "8.0", *speeds),
        hardware.Gpu(1, "Card 1", 8 * 2**30 - 2**29, 6 * 2**30, "8.1", *speeds),
    )
    assert 359e9 < speeds[0] < 361e9
    assert driver.closed == 1


def test_a_driver_that_knows_no_reserved_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver before 510 is asked in the old way."""
    Driver(monkeypatch, "memory_v2")
    assert hardware.probe().gpus[0].vram_total_bytes == 8 * 2**30


@pytest.mark.parametrize(
    ("broken", "gpus"),
    [
        ("nvmlInit", 0),
        ("nvmlDeviceGetCount", 0),
        ("nvmlDeviceGetHandleByIndex", 0),
        ("nvmlDeviceGetMemoryInfo", 0),
        ("nvmlDeviceGetCudaComputeCapability", 2),
        ("nvmlDeviceGetMaxClockInfo", 2),
        ("nvmlDeviceGetMaxPcieLinkWidth", 2),
        ("nvmlShutdown", 2),
    ],
)
def test_a_driver_that_refuses(monkeypatch: pytest.MonkeyPatch, broken: str, gpus: int) -> None:
    """No library, no driver, a lost device: fewer GPUs, never an exception."""
    Driver(monkeypatch, broken)
    assert len(hardware.probe().gpus) == gpus


def test_no_limit_on_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing limits locked memory, the limit is None."""
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(hardware, "_may_lock_without_limit", lambda: False)
    for limit, expected in ((resource.RLIM_INFINITY, None), (65536, 65536)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, limit=limit: (limit, limit))
        assert hardware.probe().memlock_limit_bytes == expected


@pytest.mark.parametrize(
    ("user", "bounding", "ambient", "limited"),
    [
        (0, 1 << 14, 0, False),
        (0, 0xFFFF & ~(1 << 14), 0, True),
        (1000, 1 << 14, 0, True),
        (1000, 0, 1 << 14, False),
        (0, None, None, True),
    ],
)
def test_a_limit_that_does_not_hold(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    user: int,
    bounding: int | None,
    ambient: int | None,
    limited: bool,
) -> None:
    """RLIMIT_MEMLOCK is none for what has CAP_IPC_LOCK: root's programs, unless it was taken away."""
    resource = pytest.importorskip("resource")
    status = tmp_path / "status"
    if bounding is not None:
        status.write_text(f"Name:\tx\nCapBnd:\t{bounding:016x}\nCapAmb:\t{ambient:016x}\n")
    monkeypatch.setattr(hardware, "_PROCESS", status)
    monkeypatch.setattr(hardware.os, "geteuid", lambda: user)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    assert hardware.probe().memlock_limit_bytes == (65536 if limited else None)
