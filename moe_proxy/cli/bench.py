"""Owns ``moe-proxy bench``: what this machine makes of a model, beside stock llama.cpp."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from moe_proxy.bench.arms import Arm, cpu_arms, gpu_arms
from moe_proxy.bench.chart import chart
from moe_proxy.bench.result import Result, Row, conditions
from moe_proxy.bench.run import Schedule, Took, run
from moe_proxy.cli.build import progress_report
from moe_proxy.cli.serve import engine_for_start, examined, say
from moe_proxy.config import Settings, load_settings
from moe_proxy.errors import ConfigError, EngineError
from moe_proxy.files import check_writable, write_text
from moe_proxy.hardware import probe
from moe_proxy.private_proxy import without_port

_LENGTHS, _BUDGETS = "128,512,2048", "30%,60%,100%"
_QUICK: dict[str, Any] = {
    "prompt_tokens": "128", "tokens": 32, "runs": 2, "warm_ups": 1, "rounds": 1, "budgets": "50%,100%"
}  # fmt: skip
_INTERRUPTED = 130
_MIB = 2**20


@click.command(epilog="Example: moe-proxy bench --model qwen3-30b-a3b-q4_k_m.gguf --budgets 8G,12G,100%")
@click.option(
    "--model", type=click.Path(path_type=Path), help="GGUF file; default: the small model that ships"
)
@click.option(
    "--gpu/--cpu", default=None, help="budgets are of VRAM on the NVIDIA GPU, or of RAM for experts"
)
@click.option("--budgets", metavar="LIST", help=f"budgets to compare; default: {_BUDGETS}, or all free VRAM")
@click.option("--prompt-tokens", metavar="LIST", help=f"lengths of prompts in tokens; default: {_LENGTHS}")
@click.option("--tokens", type=click.IntRange(min=2), help="tokens to generate; default: 128")
@click.option("--runs", type=click.IntRange(min=1), help="answers measured per arm and length; default: 6")
@click.option("--warm-ups", type=click.IntRange(min=0), help="answers before, after each start; default: 2")
@click.option("--rounds", type=click.IntRange(min=1), help="starts of each arm, alternated; default: 2")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.8, show_default=True)
@click.option(
    "--seed", type=int, default=1, show_default=True, help="of the first answer; then one more each"
)
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads, of all arms")
@click.option("--quick", is_flag=True, help="a first look: one length, two budgets, two runs")
@click.option(
    "--output", type=click.Path(path_type=Path), help="result file; default: bench-MODEL.json, here"
)
@click.option("--json", "as_json", is_flag=True, help="print the result as JSON, not as a table")
def bench(output: Path | None, quick: bool, as_json: bool, **flags: Any) -> None:
    """Measure the pager at several budgets beside stock llama.cpp, on this machine and a model of yours.

    Each arm is started alone, warmed up, and asked the same real prompts with the same seeds. Writes a result
    file after each answer and a picture beside it at the end; Ctrl-C ends it with what it has.
    """
    chosen = (_QUICK if quick else {}) | {name: value for name, value in flags.items() if value is not None}
    schedule = _schedule(chosen)
    loaded = load_settings({name: chosen.get(name) for name in ("model", "gpu", "threads")})
    changes = {"context_length": schedule.context_length, "slots": 1, "learn": False}
    settings = without_port(loaded).model_copy(update=changes)
    console = Console(stderr=True)
    examined(settings, console)
    arms = _arms(settings, chosen.get("budgets"))
    output = output or Path(f"bench-{arms[0].served.header.stem}.json")
    check_writable(output)
    server = engine_for_start(settings, None, console)
    command = shlex.join(["moe-proxy", *sys.argv[1:]])
    result = Result(conditions(arms[0].served, probe(), server, schedule, command), arms)
    interrupted = False
    try:
        with progress_report(console) as report:
            asyncio.run(_measure(arms, server, schedule, result, output, report))
    except KeyboardInterrupt:
        interrupted = True
    _show(result, output, console, as_json=as_json)
    if interrupted:
        say(console, "moe-proxy: interrupted; this is what was measured until then")
        sys.exit(_INTERRUPTED)
    if not result.samples:
        raise EngineError("no arm could be measured", next(iter(result.errors.values()), ""))


async def _measure(
    arms: tuple[Arm, ...], server: Path, schedule: Schedule, result: Result, output: Path, report: Any
) -> None:
    async def keep(took: Took) -> None:
        result.take(took)
        await asyncio.to_thread(result.write, output)

    await run(arms, server, schedule, keep, report)
    result.complete = True
    await asyncio.to_thread(result.write, output)


def _schedule(chosen: dict[str, Any]) -> Schedule:
    runs = chosen.get("runs", 6)
    return Schedule(
        prompt_tokens=_numbers(chosen.get("prompt_tokens", _LENGTHS)),
        tokens=chosen.get("tokens", 128),
        runs=runs,
        warm_ups=chosen.get("warm_ups", 2),
        rounds=min(runs, chosen.get("rounds", 2)),
        temperature=chosen["temperature"],
        seed=chosen["seed"],
    )


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))


def _numbers(text: str) -> tuple[int, ...]:
    words = _words(text)
    if not words or not all(word.isdecimal() and 0 < int(word) <= 2**20 for word in words):
        raise ConfigError(f"--prompt-tokens {text!r} is no list of lengths", "give them as in 128,512,2048")
    return tuple(sorted(map(int, words)))


def _arms(settings: Settings, budgets: str | None) -> tuple[Arm, ...]:
    words = _words(budgets) if budgets is not None else None
    if words == []:
        raise ConfigError(f"--budgets {budgets!r} names no budget", f"give some, as in {_BUDGETS}")
    if settings.gpu:
        return gpu_arms(settings, words or [settings.vram_budget])
    return cpu_arms(settings, words or _words(_BUDGETS))


def _show(result: Result, output: Path, console: Console, *, as_json: bool) -> None:
    """The table, the picture, and what could not be measured."""
    if result.samples:
        machine, model = result.conditions["machine"], result.conditions["model"]
        on = ", ".join([machine["cpu"], *(gpu["name"] for gpu in machine["gpus"])])
        picture = output.with_suffix(".svg")
        write_text(picture, chart(result, f"{model['name']} {model['quantization']} on {on}"))
        say(console, f"{output} has every sample, {picture} is the picture.")
    for arm, error in result.errors.items():
        say(console, f"{arm} was not measured: {error}")
    if as_json:
        click.echo(json.dumps(result.to_json()))
    elif result.samples:
        _print_tables(result, Console())


def _print_tables(result: Result, console: Console) -> None:
    """One table for each length of prompt, to fit 80 columns."""
    rows = list(result.rows())
    vram = any(row.median["vram_bytes"] is not None for row in rows)
    heads = ["prefill", "decode", "×stock", "first", "p50", "p95", "hits", "RSS", "disk"]
    if vram:
        heads.insert(-1, "VRAM")
    for length in dict.fromkeys(row.prompt_tokens for row in rows):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title_justify="left")
        table.title = f"prompts of {length} tokens"
        table.add_column("arm", no_wrap=True)
        for head in heads:
            table.add_column(head, justify="right", no_wrap=True)
        for row in (row for row in rows if row.prompt_tokens == length):
            table.add_row(*_cells(row, result.ratio(row), vram=vram))
        console.print(table)
    console.print(
        "medians. prefill, decode: tokens per second; ×stock: of decode; first: ms to the first token;"
        " p50, p95: ms between tokens; hits: expert picks that were resident; RSS, VRAM, and what one"
        " answer read from disk: MiB.",
        style="dim",
        highlight=False,
    )


def _cells(row: Row, ratio: float | None, *, vram: bool) -> list[str]:
    median = row.median

    def number(name: str, factor: float = 1.0, digits: int = 1) -> str:
        value = median[name]
        if value is None:
            return "-"
        return f"{value * factor:.{digits if value * factor < 100 else 0}f}"

    def size(name: str) -> str:
        value = median[name]
        return "-" if value is None else f"{value / _MIB:.{0 if value >= 100 * _MIB or not value else 1}f}"

    hit_rate = median["hit_rate"]
    return [
        row.arm.name,
        number("prompt_per_s", digits=0),
        number("decode_per_s"),
        "-" if ratio is None else f"{ratio:.2f}",
        number("first_token_s", 1000, 0),
        number("token_p50_s", 1000),
        number("token_p95_s", 1000),
        "-" if hit_rate is None else f"{hit_rate:.0%}",
        size("rss_bytes"),
        *([size("vram_bytes")] if vram else []),
        size("disk_bytes"),
    ]
