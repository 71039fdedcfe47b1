"""Owns ``collect`` and ``map``: making and judging router maps."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from moe_proxy.cli.build import progress_report
from moe_proxy.cli.serve import engine_for_start, examined
from moe_proxy.collecting import collect_map
from moe_proxy.config import load_settings
from moe_proxy.errors import ConfigError
from moe_proxy.files import check_writable, write_text
from moe_proxy.instance import instance_paths
from moe_proxy.model.gguf_header import read_header
from moe_proxy.model.layout import ModelLayout, layout_of
from moe_proxy.proxy.listening import free_port
from moe_proxy.routing.collect import builtin_prompts
from moe_proxy.routing.foreign import FORMS, ONE_DOMAIN, export, load_any
from moe_proxy.routing.labelled import Unfinished, read_prompts, work_of
from moe_proxy.routing.map_facts import coverage, keep_top, merge, only, overlap, picture
from moe_proxy.routing.router_map import ModelKey, check, doubts, dump, load
from moe_proxy.served import model_file

BUILTIN = "builtin"
"""What ``--prompts`` calls the prompts that ship."""


@click.command(epilog="Example: moe-proxy collect --model qwen3-30b-a3b-q4_k_m.gguf --output qwen3.json")
@click.option(
    "--model", type=click.Path(path_type=Path), help="GGUF file; default: the small model that ships"
)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="map file to write")
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=48,
    show_default=True,
    help="tokens to generate per prompt",
)
@click.option(
    "--prompts",
    metavar="DIR|FILE|builtin",
    default=BUILTIN,
    show_default=True,
    help='labelled prompts: a folder of DOMAIN.txt, or lines of {"prompt": ..., "domain": ...}',
)
def collect(model: Path | None, output: Path, tokens: int, prompts: str) -> None:
    """Make a router map: run labelled prompts through the engine and count experts.

    Interrupted, it goes on where it was when it is called again; until then the counts are in OUTPUT.part.
    """
    chosen = builtin_prompts() if prompts == BUILTIN else read_prompts(Path(prompts))
    # The counts come from the pager, whatever a variable or the file says of serving.
    settings = load_settings({"model": model, "port": free_port("127.0.0.1", 0), "pager": True})
    check_writable(output)
    console = Console(stderr=True)
    served = examined(settings, console)
    server = engine_for_start(settings, None, console)
    paths = instance_paths(settings.runtime_dir, settings.state_dir, settings.port)
    paths.prepare()
    unfinished = Unfinished(output.with_name(f"{output.name}.part"), work_of(chosen, tokens))
    begun = unfinished.begun(ModelKey.of(served.layout))
    if begun is not None:
        console.print(f"Going on from {unfinished.path}: {begun[1]} prompts are done.")
    source = "shipped prompts" if prompts == BUILTIN else Path(prompts).name
    with progress_report(console) as report:
        router_map = asyncio.run(
            collect_map(served, server, paths, chosen, source, tokens, unfinished, report)
        )
    write_text(output, dump(router_map))
    unfinished.remove()
    counted = sum(domain.tokens for domain in router_map.domains.values())
    click.echo(f"{output}: {len(router_map.domains)} domains, {counted} tokens")


def _layout(model: Path) -> ModelLayout:
    """Layout of the file that ``start --model`` would serve."""
    return layout_of(read_header(model_file(load_settings({"model": model}))))


@click.group("map")
def router_map() -> None:
    """Look at router maps."""


@router_map.command("show", epilog="Example: moe-proxy map show qwen3.json --top-k 16")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--top-k", type=click.IntRange(min=1), help="experts per layer; default: twice what a token uses"
)
@click.option("--domain", help="draw this domain; default: the sum of all")
def show_map(file: Path, top_k: int | None, domain: str | None) -> None:
    """Show coverage at k, how much domains overlap, and a picture: a line per layer, a column per expert."""
    shown = load(file)
    key, counts = shown.model, dict(shown.counts)
    drawn = shown if domain is None else only(shown, domain)
    console = Console()
    k = min(top_k or 2 * key.experts_used, key.experts)
    steps = sorted({min(n, key.experts) for n in (k // 2 or 1, k, 2 * k)})
    table = Table(
        title=f"{key.name}: share of picks that the busiest k of {key.experts} experts take", box=None
    )
    for column in ("domain", "tokens", *(f"k={step}" for step in steps)):
        table.add_column(column, justify="left" if column == "domain" else "right")
    for label, of_domain in counts.items():
        shares = (f"{coverage(of_domain, step):.0%}" for step in steps)
        table.add_row(label, str(shown.domains[label].tokens), *shares)
    console.print(table)
    if len(counts) > 1:
        table = Table(title="overlap of two domains' routing (1: the same)", box=None)
        for column in ("", *counts):
            table.add_column(column, justify="right")
        for a, of_a in counts.items():
            table.add_row(a, *(f"{overlap(of_a, of_b):.2f}" for of_b in counts.values()))
        console.print(table)
    if counts:
        total = np.sum(list(drawn.counts.values()), axis=0)
        console.print(f"{domain or 'all domains'}, a line per layer, darker is busier:")
        for layer, line in zip(key.layers, picture(total, max(console.width - 6, 1)), strict=True):
            console.print(f"{layer:4d}  {line}", highlight=False, markup=False, soft_wrap=True)


@router_map.command(
    "merge", epilog="Example: moe-proxy map merge monday.json tuesday.json --output week.json"
)
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), required=True, help="map file to write")
def merge_maps(files: tuple[Path, ...], output: Path) -> None:
    """Add up maps of one model."""
    merged = merge([load(file) for file in files])
    write_text(output, dump(merged))
    click.echo(f"{output}: {len(merged.domains)} domains from {len(files)} maps")


@router_map.command(
    "convert", epilog="Example: moe-proxy map convert experts.txt --model M.gguf --output map.json"
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--model", type=click.Path(path_type=Path), help="the model that FILE belongs to, if FILE does not say"
)
@click.option("--to", "form", type=click.Choice(("map", *FORMS)), default="map", show_default=True)
@click.option("--domain", help="label of a list that names no domain; of the domain to write")
@click.option("--top-k", type=click.IntRange(min=1), help="write each layer's N busiest experts")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="file to write")
def convert_map(
    file: Path, model: Path | None, form: str, domain: str | None, top_k: int | None, output: Path
) -> None:
    """Read any known form of expert list and write another.

    \b
    map      our own: counts per domain, with the model they belong to
    text     "<layer> <id> <id> ..." a line, "#" comments, "# EXPERT_TOTAL n"
    layers   {"layers": {"0": [ids]}}
    digits   {"0": [ids]}
    domains  {"domains": {d: {"per_layer_top": {"0": [ids]}}}}

    A ranked list becomes counts: the id at rank r of n counts 100 (n - r).
    """
    if model is not None:
        found = load_any(file, ModelKey.of(_layout(model)), domain=domain or ONE_DOMAIN)
    else:
        found = load(file)
    if domain is not None:
        found = only(found, domain)
    if form == "map":
        text = dump(keep_top(found, top_k) if top_k else found)
    else:
        text = export(found, form, domain=domain, top_k=top_k)
    write_text(output, text)
    click.echo(f"{output}: {form}, {len(found.domains)} domains")


@router_map.command("reset", epilog="Example: moe-proxy map reset")
@click.option("--port", type=click.IntRange(0, 65535), help="port of the proxy whose map is meant")
def reset_map(port: int | None) -> None:
    """Forget what was learned from traffic; a running proxy forgets it too."""
    settings = load_settings({"port": port})
    state = instance_paths(settings.runtime_dir, settings.state_dir, settings.port).state
    learned = sorted(state.glob("learned-*.json"))
    for path in learned:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"{path} cannot be removed ({error.strerror})", "check its rights") from error
        click.echo(f"Forgot {path}.")
    if not learned:
        click.echo(f"Nothing was learned on port {settings.port}.")


@router_map.command(
    "check", epilog="Example: moe-proxy map check qwen3.json --model qwen3-30b-a3b-q4_k_m.gguf"
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--model", type=click.Path(path_type=Path), help="also check that the map belongs to this model"
)
def check_map(file: Path, model: Path | None) -> None:
    """Say whether FILE is a usable router map; exit code 1 for a doubtful one, 2 for one that is none."""
    loaded = load(file)
    warnings = check(loaded, _layout(model)) if model else doubts(loaded)
    for domain, counts in sorted(loaded.domains.items()):
        click.echo(f"{domain:15s} {counts.tokens} tokens, {len(counts.layers)} layers")
    for warning in warnings:
        click.echo(f"warning: {warning}")
    owner = f"a router map of {loaded.model.name}"
    if warnings:
        click.echo(f"{file}: {owner}, but doubtful: see the warnings")
        sys.exit(1)
    tested = "and this is its model" if model else "not compared with a model: add --model"
    click.echo(f"{file}: ok, {owner}; {tested}")
