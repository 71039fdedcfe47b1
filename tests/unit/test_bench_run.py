"""A whole benchmark on the fake llama-server: its order, its failures, its end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_proxy.bench.arms import Arm, cpu_arms
from moe_proxy.bench.run import Schedule, Took, run
from moe_proxy.config import load_settings
from moe_proxy.private_proxy import without_port
from tests.support.command_line import run_main
from tests.support.fake_engine import PATIENCE_S, gone, until
from tests.support.proxy_process import wait_until

SCHEDULE = Schedule((4, 9), tokens=3, runs=3, warm_ups=1, rounds=2, temperature=0.8, seed=7)


@pytest.fixture
def arms(runtime_place: Path) -> tuple[Arm, ...]:
    """The pager at one budget, and stock."""
    return cpu_arms(without_port(load_settings({"model": "planted-moe"})), ["30%"])


async def _taken(
    arms: tuple[Arm, ...], server: Path, schedule: Schedule = SCHEDULE, **more: Any
) -> tuple[list[Took], list[float]]:
    taken: list[Took] = []
    shares: list[float] = []

    async def keep(took: Took) -> None:
        taken.append(took)

    await run(arms, server, schedule, keep, lambda _stage, share: shares.append(share), **more)
    return taken, shares


async def test_arms_alternate(arms: tuple[Arm, ...], fake_server: Path) -> None:
    """Each arm is started once a round, in reversed order in every other one; all runs come."""
    taken, shares = await _taken(arms, fake_server)
    assert [took.arm for took in taken if took.load_s is not None] == [
        "pager 30%",
        "stock",
        "stock",
        "pager 30%",
    ]
    for arm in arms:
        for length in (4, 9):
            mine = [took.sample for took in taken if (took.arm, took.prompt_tokens) == (arm.name, length)]
            assert [sample.seed for sample in mine if sample] == [7, 9, 8]
            assert all(sample and sample.completion_tokens == 3 for sample in mine)
            assert all(sample and sample.prompt_tokens == length for sample in mine)
    paged = next(took.sample for took in taken if took.sample and took.arm == "pager 30%")
    stock = next(took.sample for took in taken if took.sample and took.arm == "stock")
    assert paged.picks and stock.picks is None
    assert (paged.prompt_per_s, paged.decode_per_s) == (100.0, 50.0)
    assert paged.first_token_s is not None and paged.token_p50_s is not None
    assert paged.rss_bytes is not None and paged.rss_bytes > 2**20
    assert shares == sorted(shares) and shares[-1] == 1.0


async def test_an_arm_that_fails_is_left_out(arms: tuple[Arm, ...], fake_server: Path) -> None:
    """An arm that cannot be started has its error in the result; the others are measured."""
    switches = {"stock": ("--exit-at-start", "3")}
    taken, shares = await _taken(arms, fake_server, engine_args=switches)
    (error,) = [took.error for took in taken if took.arm == "stock"]
    assert error is not None and "the fake exits on demand" in error
    assert len([took for took in taken if took.sample]) == 6
    assert shares[-1] == 1.0


async def test_a_cancelled_benchmark_leaves_no_engine(
    arms: tuple[Arm, ...], fake_server: Path, tmp_path: Path
) -> None:
    """Cancelled in an answer, the engine ends."""
    starts = tmp_path / "starts"
    switches = ("--hang-after-chunks", "2", "--starts-file", str(starts))
    task = asyncio.create_task(_taken(arms, fake_server, engine_args={"pager 30%": switches}))
    await until(lambda: starts.exists() and starts.read_text().endswith("\n"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gone(int(starts.read_text()))


def test_the_command(
    runtime_place: Path, fake_server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A table, a JSON file with conditions, a picture; `--quick` is a first look."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOE_PROXY_ENGINE", str(fake_server))
    arguments = ("--quick", "--prompt-tokens", "8", "--tokens", "4", "--budgets", "50%")
    assert run_main(monkeypatch, "bench", "--model", "planted-moe", *arguments) == 0
    printed = capsys.readouterr()
    assert "pager 50%" in printed.out and "stock" in printed.out
    assert max(map(len, printed.out.splitlines())) <= 80
    found = json.loads((tmp_path / "bench-planted-moe.json").read_text())
    assert found["complete"] is True
    assert len(found["rows"]) == 2
    assert found["conditions"]["model"]["architecture"] == "qwen3moe"
    assert found["conditions"]["command"].startswith("moe-proxy bench --model planted-moe")
    assert (tmp_path / "bench-planted-moe.svg").read_text().startswith("<svg")


def test_a_command_that_can_measure_nothing(
    runtime_place: Path, fake_server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Where no arm can be started, the exit code says so, and the message why."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOE_PROXY_ENGINE", str(fake_server))
    monkeypatch.setenv("FAKE_LLAMA_SWITCHES", "--exit-at-start 3")
    assert run_main(monkeypatch, "bench", "--quick", "--model", "planted-moe") == 1
    said = capsys.readouterr().err
    assert "moe-proxy: no arm could be measured" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--prompt-tokens", "12,many"), "--prompt-tokens"),
        (("--prompt-tokens", "0"), "--prompt-tokens"),
        (("--budgets", ","), "--budgets"),
        (("--budgets", "lots"), "'lots'"),
        (("--output", "/proc/nowhere/bench.json"), "/proc/nowhere"),
    ],
)
def test_wrong_arguments(
    runtime_place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, arguments: tuple[str, ...], said: str
) -> None:
    """What cannot be is said before anything is started."""
    monkeypatch.setenv("MOE_PROXY_ENGINE", "/bin/false")
    assert run_main(monkeypatch, "bench", "--model", "planted-moe", *arguments) in (1, 2)
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_ends_it_with_what_it_has(runtime_place: Path, fake_server: Path, tmp_path: Path) -> None:
    """Interrupted: exit code 130, the table and the file of what was measured, no engine."""
    starts, output = tmp_path / "starts", tmp_path / "r.json"
    argv = [sys.executable, "-m", "moe_proxy", "bench", "--model", "planted-moe", "--output", str(output)]
    argv += ["--prompt-tokens", "8", "--tokens", "4", "--budgets", "50%", "--runs", "200", "--rounds", "1"]
    env = os.environ | {
        "MOE_PROXY_ENGINE": str(fake_server),
        "FAKE_LLAMA_SWITCHES": f"--slow-chunks 0.02 --starts-file {starts}",
    }
    with subprocess.Popen(
        argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:

        def measured() -> bool:
            return output.exists() and bool(json.loads(output.read_text())["rows"])

        wait_until(measured, "something is measured", PATIENCE_S * 3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S * 3)
    assert process.returncode == 130, err
    assert "pager 50%" in out
    assert "interrupted" in err and "Traceback" not in err
    assert json.loads(output.read_text())["complete"] is False
    assert all(gone(int(pid)) for pid in starts.read_text().split())
