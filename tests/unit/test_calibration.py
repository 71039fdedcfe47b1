"""What was measured of a machine and a model: its file, what start makes of it, its commands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_proxy import bandwidth, tuning
from moe_proxy.bandwidth import ram_bytes_per_s
from moe_proxy.bench.arms import cpu_arms
from moe_proxy.calibration import (
    Budgets,
    Calibration,
    Choice,
    Trial,
    calibrated,
    calibration_path,
    machine_of,
    read,
    write,
)
from moe_proxy.config import load_settings
from moe_proxy.hardware import Gpu, Hardware, probe
from moe_proxy.model.gguf_header import read_header
from moe_proxy.model.layout import layout_of
from moe_proxy.served import case_of, examine
from tests.support.command_line import run_main

MACHINE = Hardware(32 * 2**30, 30 * 2**30, 8, None, ())
STOCK = Trial(6, True, False, 200.0, 20.0, 4.0)


def made(hardware: Hardware = MACHINE, fingerprint: str = "f" * 64, **changes: Any) -> Calibration:
    """A calibration in which stock won."""
    return replace(
        Calibration(
            machine=machine_of(hardware),
            model="m",
            fingerprint=fingerprint,
            gpu=False,
            date="2030-01-02T03:04:05+00:00",
            version="0",
            bandwidths_bytes_per_s={"ram": 31e9, "disk": None, "vram": None, "link": None},
            budgets=Budgets(None, None),
            trials=(STOCK,),
            choice=Choice(STOCK, "stock: it is faster"),
        ),
        **changes,
    )


def test_a_file_per_machine_and_model(tmp_path: Path) -> None:
    """Another machine, model or device has another file; its own is read back as it was written."""
    path = calibration_path(tmp_path, MACHINE, "f" * 64, gpu=False)
    with_gpu = replace(MACHINE, gpus=(Gpu(0, "Card", 1, 1, "8.6"),))
    others = {
        path,
        calibration_path(tmp_path, MACHINE, "e" * 64, gpu=False),
        calibration_path(tmp_path, MACHINE, "f" * 64, gpu=True),
        calibration_path(tmp_path, replace(MACHINE, cores_physical=4), "f" * 64, gpu=False),
        calibration_path(tmp_path, with_gpu, "f" * 64, gpu=False),
    }
    assert len(others) == 5
    assert read(path, MACHINE, "f" * 64) is None
    write(made(), path)
    assert read(path, MACHINE, "f" * 64) == made()
    assert read(path, MACHINE, "e" * 64) is None
    assert read(path, with_gpu, "f" * 64) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": "moe-proxy-calibration/1"}', b"\xff\xfe"])
def test_a_file_that_is_none(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged file costs a warning that says what to do, not the start."""
    path = tmp_path / "c.json"
    path.write_bytes(content)
    assert read(path, MACHINE, "f" * 64) is None
    assert "moe-proxy tune" in caplog.text


def test_what_was_found_takes_the_place_of_what_nobody_set(own_folders: None) -> None:
    """A flag, a variable or the file is stronger than a measurement, which is stronger than a default."""
    found = calibrated(load_settings({}), made())
    assert (found.threads, found.thread_wait, found.pager) == (6, "sleep", False)
    found = calibrated(load_settings({"threads": 2, "thread_wait": "spin", "pager": True}), made())
    assert (found.threads, found.thread_wait, found.pager) == (2, "spin", True)


def test_the_pager_steps_aside_for_the_same_budgets_alone(own_folders: None) -> None:
    """Under another budget nobody measured whether stock wins."""
    found = calibrated(load_settings({"ram_budget": "8G"}), made())
    assert (found.threads, found.pager) == (6, True)


@pytest.fixture
def model(own_folders: None, planted_model: Path) -> Calibration:
    """A calibration of this machine and the planted model, in its place."""
    fingerprint = layout_of(read_header(planted_model)).fingerprint
    calibration = made(probe(), fingerprint)
    path = calibration_path(load_settings({}).state_dir, probe(), fingerprint, gpu=False)
    write(calibration, path)
    return calibration


def test_a_start_goes_by_it(model: Calibration, planted_model: Path) -> None:
    """`start` uses what tune found, says so, and plans with the measured bandwidths."""
    served = examine(load_settings({"model": planted_model}))
    assert (served.settings.threads, served.settings.pager) == (6, False)
    assert (served.asked.threads, served.asked.pager) == (None, True)
    (note,) = [note for note in served.notes if "2030-01-02" in note]
    assert "6 threads" in note and "stock llama.cpp is faster" in note
    rates = case_of(served).bandwidths
    assert (rates.ram.bytes_per_s, rates.ram.source) == (31e9, "measured by moe-proxy tune")
    assert rates.disk.source.startswith("assumed")


def test_a_benchmark_says_itself_who_pages(model: Calibration, planted_model: Path) -> None:
    """Its arms go by what tune found of threads, and not by who won."""
    paged, stock = cpu_arms(load_settings({"model": planted_model}), ["100%"])
    assert (paged.served.settings.pager, stock.served.settings.pager) == (True, False)
    assert paged.served.settings.threads == stock.served.settings.threads == 6


def test_it_can_be_switched_off(model: Calibration, planted_model: Path) -> None:
    """`calibrated = false`: as if nothing had been measured."""
    served = examine(load_settings({"model": planted_model, "calibrated": False}))
    assert (served.settings, served.calibration) == (served.asked, None)
    assert served.settings.pager is True


def test_doctor_shows_it(
    model: Calibration, planted_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Kept in a file that `doctor` shows."""
    monkeypatch.setenv("MOE_PROXY_ENGINE", "/bin/true")
    run_main(monkeypatch, "doctor", "--model", str(planted_model), "--port", "0")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if " tuning " in line]
    assert "stock, 6 threads sleeping, 20.0 tokens/s on 2030-01-02; ram 31.0 GB/s" in line


def test_tune_and_forget(
    runtime_place: Path, fake_server: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """`tune` measures by real serving, prints the table, keeps the file; `--forget` removes it."""
    monkeypatch.setenv("MOE_PROXY_ENGINE", str(fake_server))
    monkeypatch.setattr(bandwidth, "_RAM_BYTES", 2**22)
    monkeypatch.setattr(tuning, "thread_counts", lambda cores, logical: (1,))
    arguments = ("--model", "planted-moe", "--runs", "1", "--tokens", "4", "--prompt-tokens", "8")
    assert run_main(monkeypatch, "tune", *arguments) == 0
    printed = capsys.readouterr().out
    assert "chosen" in printed and "ram" in printed and "stock, " in printed
    (path,) = load_settings({}).state_dir.glob("calibration/*.json")
    found = json.loads(path.read_text())
    # The fake times every answer alike: nobody wins, and the pager stays.
    assert found["choice"]["trial"]["pager"] is True
    assert found["bandwidths_bytes_per_s"]["ram"] > 1e6
    assert found["bandwidths_bytes_per_s"]["vram"] is None
    served = examine(load_settings({"model": Path("planted-moe")}))
    assert served.settings.threads == found["choice"]["trial"]["threads"]
    assert run_main(monkeypatch, "tune", "--model", "planted-moe", "--forget") == 0
    assert not path.exists()
    assert run_main(monkeypatch, "tune", "--model", "planted-moe", "--forget") == 0
    assert "Nothing was measured" in capsys.readouterr().out


def test_the_bandwidth_of_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    """RAM is read at some speed, by one thread and by two."""
    monkeypatch.setattr(bandwidth, "_RAM_BYTES", 2**22)
    assert ram_bytes_per_s(1) > 1e6
    assert ram_bytes_per_s(2) > 1e6
