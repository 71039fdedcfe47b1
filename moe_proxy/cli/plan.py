"""Owns ``moe-proxy plan``: what a start would come to, before anything is started."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from moe_proxy.app import launch_for
from moe_proxy.cli.client import paths_of
from moe_proxy.cli.memory_picture import bar, expected_speed_text, hit_text, speed_text
from moe_proxy.cli.options import refuse_words, serving_options
from moe_proxy.cli.serve import examined
from moe_proxy.cli.units import bytes_text
from moe_proxy.config import Settings, load_settings
from moe_proxy.engine.build import engine_for
from moe_proxy.engine.launch import batch_of, cache_types, refuse_our_flags
from moe_proxy.engine.recipe import BuildRequest
from moe_proxy.errors import ConfigError, EngineError, TruncatedError
from moe_proxy.forecast import Bandwidths, Case, Forecast, Improvement, Rate, forecast, improvements
from moe_proxy.hardware import Gpu, Hardware, probe
from moe_proxy.planner import parse_budget
from moe_proxy.served import Served, case_of

_MEDIA = ("vram", "link", "ram", "disk")
_BAR_CELLS = 60


@click.command(
    epilog="Example: moe-proxy plan --model qwen3-30b-a3b-q4_k_m.gguf --vram 8G --ram 32G --ctx 16384"
)
@serving_options
@click.option(
    "--vram", metavar="SIZE", help="plan --gpu for a card with so much: 8G; default: this machine's"
)
@click.option("--ram", metavar="SIZE", help="plan for so much available RAM: 32G; default: this machine's")
@click.option(
    "--bandwidth",
    "given",
    multiple=True,
    metavar="NAME=GB/S",
    help="vram, link, ram or disk, in place of what is assumed: --bandwidth ram=60",
)
@click.option("--json", "as_json", is_flag=True, help="print the plan as JSON")
@click.argument("engine_args", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGS FOR LLAMA-SERVER]")
@click.pass_context
def plan(
    context: click.Context,
    /,
    vram: str | None,
    ram: str | None,
    given: tuple[str, ...],
    as_json: bool,
    engine_args: tuple[str, ...],
    **flags: Any,
) -> None:
    """Show what start with the same flags would come to: memory, hit rate, speed, command.

    Nothing is started, and of the model only the header need be there. All figures are estimates.
    """
    refuse_words(engine_args)
    refuse_our_flags(engine_args)
    if vram is not None:
        flags |= {"gpu": True, "vram_budget": vram}
    settings = load_settings(flags)
    hardware = _machine(settings, vram, ram)
    look = partial(
        examined, settings, Console(stderr=True), hardware=hardware, cache_types=cache_types(engine_args)
    )
    try:
        served = look()
    except TruncatedError:
        served = look(complete=False)
        click.echo("The file ends before its weights do: this goes by its header alone.", err=True)
    case = case_of(served, batch_of(engine_args))
    case = replace(case, bandwidths=_with(case.bandwidths, given))
    expected, better = forecast(case), improvements(case)
    start = _start_command(context, flags, engine_args)
    engine = _engine_command(served, engine_args)
    if as_json:
        click.echo(json.dumps(_facts(served, case, expected, better, start, engine)))
        return
    console = Console(highlight=False, emoji=False)
    for line in _picture(served, expected, console):
        console.print(line, soft_wrap=True)
    for text in (
        *_figures(case, expected),
        *_commands(start, engine),
        *_more(better, served, expected, case),
    ):
        console.print(text, markup=False, soft_wrap=True)


def _machine(settings: Settings, vram: str | None, ram: str | None) -> Hardware:
    """This machine, or one with the memory that was given in its place. Raises ConfigError."""
    hardware = probe()
    if ram is not None:
        size_bytes = parse_budget(ram).size_bytes
        if not size_bytes:
            raise ConfigError(f"--ram {ram} is no amount of RAM", "write it as 32G")
        total = max(hardware.ram_total_bytes, size_bytes)
        hardware = replace(hardware, ram_total_bytes=total, ram_available_bytes=size_bytes)
    if vram is not None:
        size_bytes = parse_budget(vram).size_bytes or 0
        gpu = hardware.gpus[0] if hardware.gpus else Gpu(0, "a card", 0, 0, "")
        if gpu.vram_free_bytes < size_bytes:
            # Another card: of its speed nothing is known.
            gpu = Gpu(0, "a card", size_bytes, size_bytes, "")
        hardware = replace(hardware, gpus=(gpu, *hardware.gpus[1:]))
    elif settings.gpu and not hardware.gpus:
        raise ConfigError("no NVIDIA GPU was found", "say which card to plan for: --vram 8G")
    return hardware


def _with(bandwidths: Bandwidths, given: tuple[str, ...]) -> Bandwidths:
    """``bandwidths`` with those that were given. Raises ConfigError."""
    for text in given:
        name, _, number = text.partition("=")
        try:
            gb_per_s = float(number)
        except ValueError:
            gb_per_s = 0.0
        if name not in _MEDIA or not 0 < gb_per_s < 1e6:
            raise ConfigError(
                f"--bandwidth {text} is no bandwidth", f"write {'|'.join(_MEDIA)}=GB/s, as in ram=60"
            )
        rate: Any = Rate(gb_per_s * 1e9, "as given")
        bandwidths = replace(bandwidths, **{name: rate})
    return bandwidths


def _start_command(context: click.Context, flags: Mapping[str, Any], engine_args: tuple[str, ...]) -> str:
    """The start that is planned for: the same flags."""
    words = ["moe-proxy", "start"]
    for option in context.command.params:
        value = flags.get(option.name or "")
        if value is None:
            continue
        if isinstance(option, click.Option) and (option.is_flag or option.secondary_opts):
            words.append((option.opts if value else option.secondary_opts)[0])
        else:
            words += [option.opts[0], str(value)]
    return shlex.join(words + (["--", *engine_args] if engine_args else []))


def _engine_command(served: Served, engine_args: tuple[str, ...]) -> str:
    """The llama-server that it would run, with the variables that the pager reads."""
    settings = served.settings
    server = settings.engine
    if server is None:
        try:
            built = engine_for(BuildRequest(cache_dir=settings.cache_dir, cuda=settings.gpu))
        except EngineError:
            built = None
        server = built.server if built else Path("llama-server")
    launch = launch_for(served, server, paths_of(settings), engine_args)
    variables = [f"{name}={value}" for name, value in launch.env.items() if name.startswith("MOE_PAGER")]
    return shlex.join([*sorted(variables), *launch.argv])


def _picture(served: Served, expected: Forecast, console: Console) -> list[Text]:
    layout, reason = served.layout, expected.plan.reason
    active, whole = layout.experts_used * sum(layout.expert_bytes.values()), layout.total_expert_bytes
    lines = [
        Text(f"{layout.name}: {layout.architecture}, {served.header.quantization}", style="bold"),
        Text(
            f"{len(layout.layers)} layers of {layout.experts} experts, {bytes_text(whole)};"
            f" a token uses {layout.experts_used} of each layer, {bytes_text(active)}"
        ),
        Text(f"{reason[:1].upper()}{reason[1:]}."),
        Text(),
    ]
    # A block of colour needs a terminal that shows both.
    letters = console.no_color or console.color_system is None or console.options.ascii_only
    width = max(min(_BAR_CELLS, console.width - 18), 10)
    for title, memory in (("VRAM", expected.vram), ("RAM", expected.ram)):
        if memory is not None:
            lines += bar(title, memory, width, letters=letters)
    return [*lines, Text()]


def _figures(case: Case, expected: Forecast) -> list[str]:
    of_map = "no router map: any routing gives that"
    if not case.pager:
        of_map = "without the pager"
    elif expected.resident_share >= 1:
        of_map = "all experts are resident"
    elif expected.hits.from_map and case.router_map is not None:
        learned = " and what was learned on this port" if case.router_map.made.get("learned") else ""
        of_map = f"the prior of the router map{learned} alone"
    lines = [
        f"Resident experts  {bytes_text(expected.resident_bytes)}, {expected.resident_share:.0%} of all",
        f"Hit rate          {hit_text(expected.hits)} (estimate: {of_map})",
        f"Speed             {expected_speed_text(expected)} (estimate: one request, short context;"
        f" reading alone allows {speed_text(expected.limit_tokens_per_s)})",
    ]
    for read in expected.reads:
        rate = case.bandwidths.of(read.medium)
        milliseconds = 1e3 * read.size_bytes / rate.bytes_per_s
        lines.append(
            f"  {read.what:16s}{bytes_text(read.size_bytes):>10s} a token from {read.medium:4s} at"
            f" {rate.bytes_per_s / 1e9:.0f} GB/s: {milliseconds:.2f} ms ({rate.source})"
        )
    if expected.vram is not None:
        layers, overhead_s = len(case.layout.layers), case.bandwidths.layer_overhead_s
        lines.append(
            f"  {'launching':16s}{layers:>6d} layers at {1e6 * overhead_s:.0f} us:"
            f" {1e3 * overhead_s * layers:.2f} ms (from docs/benchmarks.md, of one GPU)"
        )
    return [*lines, ""]


def _commands(start: str, engine: str) -> list[str]:
    return ["Start it with", f"  {start}", "which runs", f"  {engine}", ""]


def _more(better: tuple[Improvement, ...], served: Served, expected: Forecast, case: Case) -> list[str]:
    lines = [
        f"  {improvement.change}: {improvement.hit_rate:.0%} resident, {speed_text(improvement.tokens_per_s)}"
        for improvement in better
    ]
    if case.router_map is None and case.pager and expected.resident_share < 1:
        collect = ["moe-proxy", "collect", "--model", str(served.model), "--output", "map.json"]
        lines += ["  a router map of this model:", f"    {shlex.join(collect)}"]
    return [
        "To get more",
        *(lines or ["  a smaller quantisation or a faster machine; nothing else is worth 5 %"]),
    ]


def _facts(
    served: Served,
    case: Case,
    expected: Forecast,
    better: tuple[Improvement, ...],
    start: str,
    engine: str,
) -> dict[str, object]:
    memories = {
        name: {
            "total_bytes": memory.total_bytes,
            "parts": {part.name: part.size_bytes for part in memory.parts},
            "free_bytes": memory.free_bytes,
            "over_bytes": memory.over_bytes,
        }
        for name, memory in (("vram", expected.vram), ("ram", expected.ram))
        if memory is not None
    }
    return {
        "model": served.layout.name,
        "architecture": served.layout.architecture,
        "context_tokens": served.wanted.context.tokens,
        "plan": asdict(expected.plan),
        "memory": memories,
        "resident_bytes": expected.resident_bytes,
        "hit_rate": asdict(expected.hits),
        "reads": [asdict(read) for read in expected.reads],
        "bandwidths": asdict(case.bandwidths),
        "tokens_per_s": round(expected.tokens_per_s, 2),
        "limit_tokens_per_s": round(expected.limit_tokens_per_s, 2),
        "start_command": start,
        "engine_command": engine,
        "improvements": [asdict(improvement) for improvement in better],
    }
