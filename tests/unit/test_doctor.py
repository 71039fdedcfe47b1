"""What doctor makes of machines that are not here: each finding with its level and its cure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pynvml
import pytest

from moe_proxy import surroundings
from moe_proxy.cli import findings
from moe_proxy.cli.findings import Finding, Toolkit
from moe_proxy.hardware import Gpu, Hardware
from moe_proxy.model.gguf_header import read_header
from moe_proxy.model.layout import layout_of
from moe_proxy.surroundings import Link, ReadSpeed, Surroundings, look, read_speed
from tests.support.build_world import write
from tests.support.command_line import run_main

GIB = 2**30
CARD = Gpu(0, "RTX", 8 * GIB, 7 * GIB, "8.9")
MACHINE = Hardware(32 * GIB, 16 * GIB, 8, None, (CARD,))
LINK = Link(0, 4, 4, 16, 16)
AROUND = Surroundings("580.65", "13.0", (LINK,), ("0000:01:00.0",), False, "madvise", 0, None)
TOOLKIT = Toolkit(Path("/usr/local/cuda/bin/nvcc"), "13.0")


def _levels(found: Iterable[Finding]) -> dict[str, str]:
    """Level by subject; what is no ok has a cure, and only that."""
    levels = {}
    for finding in found:
        assert bool(finding.cure) == (finding.level != "ok"), finding
        levels[finding.subject] = finding.level
    return levels


def _cards(**changes: Any) -> dict[str, str]:
    told = {
        "hardware": MACHINE,
        "around": AROUND,
        "wanted": True,
        "toolkit": TOOLKIT,
        "engine_is_there": False,
    }
    return _levels(findings.cards(**(told | changes)))


def test_a_machine_that_has_everything() -> None:
    """Driver, toolkit, compute capability and link: a line each, all ok."""
    assert _cards() == {"gpu": "ok", "driver": "ok", "toolkit": "ok", "link": "ok"}
    (link,) = [
        found for found in findings.cards(MACHINE, AROUND, True, TOOLKIT, False) if found.subject == "link"
    ]
    assert link.text == "PCIe generation 4 of 4, 16 of 16 lanes"


@pytest.mark.parametrize(
    ("changes", "subject", "level"),
    [
        ({"hardware": replace(MACHINE, gpus=(replace(CARD, compute_capability="7.0"),))}, "gpu", "fail"),
        ({"hardware": replace(MACHINE, gpus=(replace(CARD, compute_capability=""),))}, "gpu", "ok"),
        ({"around": replace(AROUND, driver="535.1", driver_cuda="12.2")}, "driver", "fail"),
        (
            {"around": replace(AROUND, driver_cuda="13.0"), "toolkit": Toolkit(Path("n"), "13.9")},
            "driver",
            "ok",
        ),
        ({"around": replace(AROUND, driver="", driver_cuda="")}, "driver", "warn"),
        ({"toolkit": None}, "toolkit", "fail"),
        ({"toolkit": None, "wanted": False}, "toolkit", "warn"),
        ({"toolkit": None, "engine_is_there": True}, "toolkit", "ok"),
        ({"around": replace(AROUND, links=(replace(LINK, lanes=4),))}, "link", "warn"),
        ({"around": replace(AROUND, links=(replace(LINK, generation=1),))}, "link", "ok"),
        ({"hardware": replace(MACHINE, gpus=())}, "gpu", "fail"),
        ({"hardware": replace(MACHINE, gpus=()), "wanted": False}, "gpu", "warn"),
        ({"hardware": replace(MACHINE, gpus=()), "around": replace(AROUND, nvidia_cards=())}, "gpu", "fail"),
    ],
)
def test_a_card_that_lacks_something(changes: dict[str, Any], subject: str, level: str) -> None:
    """What keeps a start with --gpu from working is a failure; what makes it slow is a warning."""
    assert _cards(**changes)[subject] == level


def test_a_card_without_a_driver_is_seen() -> None:
    """A newcomer's card without a driver is named, not passed over as no card."""
    (found,) = findings.cards(replace(MACHINE, gpus=()), AROUND, False, None, False)
    assert "0000:01:00.0" in found.text
    assert "nvidia-smi" in found.cure


@pytest.mark.parametrize(
    ("wsl", "expert_bytes", "level"),
    [(False, 99 * GIB, "ok"), (True, 0, "warn"), (True, 15 * GIB, "ok"), (True, 17 * GIB, "fail")],
)
def test_pinned_memory_under_wsl(wsl: bool, expert_bytes: int, level: str) -> None:
    """WSL2 pins about half of the RAM: experts beyond it are a failure before anything is started."""
    found = findings.pinning(MACHINE, replace(AROUND, wsl=wsl), expert_bytes)
    assert _levels([found]) == {"pinning": level}


@pytest.mark.parametrize(
    ("hardware", "around", "levels"),
    [
        (MACHINE, AROUND, {"memory": "ok", "huge pages": "ok"}),
        (replace(MACHINE, ram_available_bytes=GIB), AROUND, {"memory": "warn", "huge pages": "ok"}),
        (
            MACHINE,
            replace(AROUND, container_bytes=4 * GIB),
            {"memory": "ok", "container": "warn", "huge pages": "ok"},
        ),
        (MACHINE, replace(AROUND, container_bytes=64 * GIB), {"memory": "ok", "huge pages": "ok"}),
        (MACHINE, replace(AROUND, huge_pages="never"), {"memory": "ok", "huge pages": "warn"}),
        (MACHINE, replace(AROUND, huge_pages=""), {"memory": "ok", "huge pages": "ok"}),
        (MACHINE, replace(AROUND, reserved_huge_pages_bytes=GIB), {"memory": "ok", "huge pages": "warn"}),
    ],
)
def test_memory(hardware: Hardware, around: Surroundings, levels: dict[str, str]) -> None:
    """RAM, a container's limit, huge pages that are off or that were taken away from everybody."""
    assert _levels([*findings.memory(hardware, around), *findings.huge_pages(around)]) == levels


@pytest.mark.parametrize(("limit", "level"), [(None, "ok"), (65536, "warn")])
def test_memory_that_may_be_locked(limit: int | None, level: str) -> None:
    """RLIMIT_MEMLOCK warns where it holds, and nowhere else."""
    assert _levels([findings.locking(replace(MACHINE, memlock_limit_bytes=limit))]) == {"memlock": level}


@pytest.mark.parametrize(
    ("speed", "level", "said"),
    [
        (None, "ok", "cannot be measured"),
        (ReadSpeed(Path("m"), 1 << 20, 0.001), "ok", "too small"),
        (ReadSpeed(Path("m"), 256 << 20, 0.25), "ok", "reads 1.0 GiB a second (m), so this model takes 18 s"),
        (ReadSpeed(Path("m"), 100 << 20, 1.0), "warn", "100.0 MiB a second"),
    ],
)
def test_disk(speed: ReadSpeed | None, level: str, said: str) -> None:
    """Disk speed, with what it means for this model; a hard disk is a warning."""
    found = findings.disk(speed, 18 * GIB)
    assert _levels([found]) == {"disk": level}
    assert said in found.text


def test_model_facts(planted_model: Path) -> None:
    """GGUF facts: layers, experts, quantisation, size."""
    header = read_header(planted_model)
    text = findings.model(header, layout_of(header)).text
    assert "qwen3moe, 6 MoE layers, 4 of 32 experts for a token, F16, 45.8 MiB" in text


def test_a_read_is_bounded_in_time(tmp_path: Path) -> None:
    """The disk is read for a second at most: with a clock that leaps, one block is read."""
    path = tmp_path / "m"
    path.write_bytes(bytes(12 << 20))
    times: Iterator[float] = iter([0.0, 5.0])
    assert read_speed(path, clock=lambda: next(times), flags=0) == ReadSpeed(path, 4 << 20, 5.0)
    seconds = iter([0.0, 0.1, 0.2, 0.3, 0.4])
    assert read_speed(path, clock=lambda: next(seconds), flags=0) == ReadSpeed(path, 12 << 20, 0.4)


@pytest.mark.parametrize("name", ["nothing-here", "."])
def test_what_cannot_be_read_has_no_speed(tmp_path: Path, name: str) -> None:
    """A look never fails."""
    assert read_speed(tmp_path / name, flags=0) is None


PCI = "sys/bus/pci/devices"


def test_looking_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """WSL2, huge pages, a control group and cards are read from where the kernel tells them."""
    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: b"580.65",
        "nvmlSystemGetCudaDriverVersion": lambda: 13010,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetCurrPcieLinkGeneration": lambda handle: 1,
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda handle: 4,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda handle: 8,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda handle: 16,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    write(
        tmp_path,
        {
            "proc/sys/kernel/osrelease": "5.15.90.1-microsoft-standard-WSL2\n",
            "proc/meminfo": "MemTotal: 1 kB\nHugetlb:         2097152 kB\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
            "sys/fs/cgroup/memory.max": "4294967296\n",
            f"{PCI}/0000:01:00.0/vendor": "0x10de\n",
            f"{PCI}/0000:01:00.0/class": "0x030000\n",
            f"{PCI}/0000:01:00.1/vendor": "0x10de\n",
            f"{PCI}/0000:01:00.1/class": "0x040300\n",
            f"{PCI}/0000:02:00.0/vendor": "0x8086\n",
            f"{PCI}/0000:02:00.0/class": "0x030000\n",
        },
    )
    assert look(tmp_path) == Surroundings(
        "580.65", "13.1", (Link(0, 1, 4, 8, 16),), ("0000:01:00.0",), True, "madvise", 2 * GIB, 4 * GIB
    )


def test_looking_where_nothing_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without driver, /proc and /sys, all is absent and nothing fails; so with a driver that breaks."""

    def broken(*arguments: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

    nothing = Surroundings("", "", (), (), False, "", 0, None)
    monkeypatch.setattr(pynvml, "nvmlInit", broken)
    assert look(tmp_path) == nothing
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", broken)
    monkeypatch.setattr(pynvml, "nvmlShutdown", broken)
    assert look(tmp_path) == nothing
    monkeypatch.setattr(surroundings, "pynvml", None)
    assert look(tmp_path) == nothing


@pytest.mark.usefixtures("own_folders")
def test_the_exit_code_says_it(monkeypatch: pytest.MonkeyPatch, capsys: Any, planted_model: Path) -> None:
    """A failure is exit code 1, warnings are 0; --json has level, subject, text and cure of each finding."""
    module = import_module("moe_proxy.cli.doctor")
    monkeypatch.setattr(module, "look", lambda: replace(AROUND, huge_pages="never", nvidia_cards=()))
    monkeypatch.setattr(module, "probe", lambda: replace(MACHINE, gpus=()))
    assert run_main(monkeypatch, "doctor", "--port", "0", "--model", str(planted_model), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert {frozenset(finding) for finding in found} == {frozenset({"level", "subject", "text", "cure"})}
    subjects = {finding["subject"]: finding["level"] for finding in found}
    assert subjects["huge pages"] == "warn"
    assert subjects["model"] == subjects["plan"] == subjects["port"] == "ok"
    assert run_main(monkeypatch, "doctor", "--port", "0", "--gpu") == 1
    assert "fail gpu" in capsys.readouterr().out
