"""Owns ``moe-proxy tune``: measures this machine with a model, and keeps what ``start`` then goes by."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from moe_proxy import __version__
from moe_proxy.bandwidth import ram_bytes_per_s
from moe_proxy.calibration import Budgets, Calibration, calibration_path, machine_of, write
from moe_proxy.cli.build import progress_report
from moe_proxy.cli.serve import engine_for_start, examined, say
from moe_proxy.config import Settings, load_settings
from moe_proxy.files import check_writable
from moe_proxy.private_proxy import without_port
from moe_proxy.served import Served
from moe_proxy.surroundings import read_speed
from moe_proxy.tuning import Effort, Tuned, Way, thread_counts, tune

_GB = 1e9


@click.command("tune", epilog="Example: moe-proxy tune --model qwen3-30b-a3b-q4_k_m.gguf")
@click.option(
    "--model", type=click.Path(path_type=Path), help="GGUF file; default: the small model that ships"
)
@click.option("--gpu/--cpu", default=None, help="for start with the same flag")
@click.option("--ram-budget", metavar="SIZE", help="for start with the same budget")
@click.option("--vram-budget", metavar="SIZE", help="for start with the same budget")
@click.option("--runs", type=click.IntRange(min=1), default=4, show_default=True, help="answers per trial")
@click.option("--tokens", type=click.IntRange(min=2), default=64, show_default=True, help="of an answer")
@click.option(
    "--prompt-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="of a prompt"
)
@click.option("--forget", is_flag=True, help="remove what was measured of this model, and measure nothing")
@click.option("--json", "as_json", is_flag=True, help="print the result as JSON")
def tune_command(
    runs: int, tokens: int, prompt_tokens: int, forget: bool, as_json: bool, **flags: Any
) -> None:
    """Find the number of threads, how they wait, and whether the pager or stock llama.cpp serves faster here.

    Every choice is made by real serving. `start` goes by the result where nothing else is set, `doctor` shows
    it. Measure on a machine that does nothing else.
    """
    settings = without_port(load_settings(flags)).model_copy(update={"calibrated": False})
    console = Console(stderr=True)
    served = examined(settings, console)
    if forget:
        _forget(settings, served)
        return
    path = calibration_path(settings.state_dir, served.hardware, served.layout.fingerprint, gpu=settings.gpu)
    check_writable(path)
    server = engine_for_start(settings, None, console)
    effort = Effort(prompt_tokens, tokens, runs)
    with progress_report(console) as report:
        report("bandwidths", 0.0)
        bandwidths = _bandwidths(served)
        tuned = asyncio.run(tune(settings, server, effort, report))
    calibration = Calibration(
        machine=machine_of(served.hardware),
        model=served.layout.name,
        fingerprint=served.layout.fingerprint,
        gpu=settings.gpu,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        version=__version__,
        bandwidths_bytes_per_s=bandwidths,
        budgets=Budgets(settings.ram_budget, settings.vram_budget),
        trials=tuned.trials,
        choice=tuned.choice,
    )
    write(calibration, path)
    if as_json:
        click.echo(json.dumps({"file": str(path), **asdict(calibration)}))
    else:
        _print(calibration, tuned)
        say(console, f"Kept in {path}; start goes by it, moe-proxy tune --forget removes it.")


def _bandwidths(served: Served) -> dict[str, float | None]:
    """Bytes per second. Those of a GPU are for the engine to measure, which does not do so yet."""
    cores = served.hardware.cores_physical
    disk = read_speed(served.header.files[0])
    return {
        "ram": max(ram_bytes_per_s(threads) for threads in thread_counts(cores, cores)),
        "disk": disk.read_bytes / disk.seconds if disk is not None else None,
        "vram": None,
        "link": None,
    }


def _forget(settings: Settings, served: Served) -> None:
    removed = False
    for gpu in (False, True):
        path = calibration_path(settings.state_dir, served.hardware, served.layout.fingerprint, gpu=gpu)
        if path.exists():
            path.unlink()
            removed = True
            click.echo(f"Removed {path}.")
    if not removed:
        click.echo(f"Nothing was measured of {served.layout.name} on this machine.")


def _print(calibration: Calibration, tuned: Tuned) -> None:
    console = Console(highlight=False)
    known = [
        f"{name} {value / _GB:.1f} GB/s"
        for name, value in calibration.bandwidths_bytes_per_s.items()
        if value is not None
    ]
    console.print(f"{calibration.model} on {calibration.machine}", markup=False)
    console.print(f"read from {', '.join(known)}", markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("way to serve")
    for head in ("prompt t/s", "decode t/s", "answer, s", ""):
        table.add_column(head, justify="right")
    for trial in sorted(tuned.trials, key=lambda trial: trial.answer_s):
        table.add_row(
            Way(trial.threads, trial.patient, trial.pager).name,
            f"{trial.prompt_per_s:.0f}",
            f"{trial.decode_per_s:.1f}",
            f"{trial.answer_s:.2f}",
            "chosen" if trial == tuned.choice.trial else "",
        )
    console.print(table)
    console.print(f"{tuned.choice.reason[:1].upper()}{tuned.choice.reason[1:]}.", markup=False)
