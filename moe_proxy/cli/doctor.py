"""Owns ``moe-proxy doctor``: what this machine has and lacks, each finding with its cure."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import click
from rich.console import Console

from moe_proxy import __version__
from moe_proxy.cli.client import get_json, paths_of
from moe_proxy.cli.serve import check_port_is_free
from moe_proxy.cli.units import bytes_text
from moe_proxy.config import Settings, load_settings
from moe_proxy.engine.build import engine_for
from moe_proxy.engine.recipe import BuildRequest
from moe_proxy.errors import MoeProxyError, NotRunningError
from moe_proxy.hardware import Hardware, probe
from moe_proxy.instance import running_proxy
from moe_proxy.model.gguf_header import read_header
from moe_proxy.model.layout import layout_of
from moe_proxy.served import model_file, plan_of

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: Literal["ok", "warn", "fail"]
    subject: str
    text: str
    cure: str = ""


@click.command(epilog="Example: moe-proxy doctor --model qwen3-30b-a3b-q4_k_m.gguf")
@click.option("--port", type=click.IntRange(0, 65535), help="port of the proxy")
@click.option("--model", type=click.Path(path_type=Path), help="also say whether this model fits")
@click.option("--gpu/--cpu", default=None, help="look at what start with the same flag would use")
@click.option("--json", "as_json", is_flag=True, help="print the findings as JSON")
def doctor(port: int | None, model: Path | None, gpu: bool | None, as_json: bool) -> None:
    """Check compiler, engine, memory, GPU, port, model and a running proxy; exit code 1 on a failure."""
    settings = load_settings({"port": port, "model": model, "gpu": gpu})
    hardware = probe()
    findings = [
        Finding("ok", "moe-proxy", f"{__version__}, Python {sys.version.split()[0]}"),
        _engine(settings),
        _memory(hardware),
        _locking(hardware),
        _gpu(settings, hardware),
        *_model(settings, hardware),
        _proxy(settings),
    ]
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings]))
    else:
        console = Console()
        for finding in findings:
            colour = _COLOURS[finding.level]
            cure = f": {finding.cure}" if finding.cure else ""
            console.print(f"[{colour}]{finding.level:4s}[/] {finding.subject:10s} ", end="")
            console.print(f"{finding.text}{cure}", markup=False, highlight=False, soft_wrap=True)
    if any(finding.level == "fail" for finding in findings):
        sys.exit(1)


def _engine(settings: Settings) -> Finding:
    if settings.engine is not None:
        return Finding("ok", "engine", f"{settings.engine}, as configured")
    try:
        engine = engine_for(BuildRequest(cache_dir=settings.cache_dir, cuda=settings.gpu))
    except MoeProxyError as error:
        return Finding("fail", "engine", error.message, error.hint)
    if engine is not None:
        return Finding("ok", "engine", f"built, key {engine.key}")
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        return Finding("fail", "engine", "not built, and there is no C++ compiler", "apt-get install g++")
    cache = settings.cache_dir
    folder = next((path for path in (cache, *cache.parents) if path.exists()), cache)
    if not os.access(folder, os.W_OK):
        cure = "set MOE_PROXY_CACHE_DIR to a folder you may write"
        return Finding("fail", "engine", f"not built, and {folder} cannot be written", cure)
    return Finding("warn", "engine", "not built yet", "moe-proxy build, or let start do it")


def _memory(hardware: Hardware) -> Finding:
    return Finding(
        "ok",
        "memory",
        f"{bytes_text(hardware.ram_available_bytes)} free of {bytes_text(hardware.ram_total_bytes)},"
        f" {hardware.cores_physical} cores",
    )


def _locking(hardware: Hardware) -> Finding:
    limit = hardware.memlock_limit_bytes
    if limit is None:
        return Finding("ok", "memlock", "nothing limits how much memory may be locked")
    return Finding(
        "warn",
        "memlock",
        f"RLIMIT_MEMLOCK is {bytes_text(limit)}, so hot experts beyond it are read in but not locked",
        "raise it with: ulimit -l unlimited",
    )


def _gpu(settings: Settings, hardware: Hardware) -> Finding:
    if not hardware.gpus and settings.gpu:
        return Finding("fail", "gpu", "no NVIDIA GPU was found", "use --cpu, or see what nvidia-smi says")
    if not hardware.gpus:
        return Finding("ok", "gpu", "no NVIDIA GPU found; --cpu is the way here")
    named = ", ".join(f"{gpu.name} {bytes_text(gpu.vram_total_bytes)}" for gpu in hardware.gpus)
    if shutil.which("nvcc") is None and settings.engine is None:
        return Finding("warn", "gpu", f"{named}, but no nvcc", "install the CUDA toolkit to use --gpu")
    return Finding("ok", "gpu", named)


def _model(settings: Settings, hardware: Hardware) -> list[Finding]:
    if settings.model is None:
        return []
    try:
        header = read_header(model_file(settings))
        layout = layout_of(header)
        chosen = plan_of(settings, header, layout, hardware)
    except MoeProxyError as error:
        return [Finding("fail", "model", error.message, error.hint)]
    return [Finding("ok", "model", f"{layout.name}: {chosen.reason}")]


def _proxy(settings: Settings) -> Finding:
    paths = paths_of(settings)
    proxy = running_proxy(paths)
    if proxy is None:
        try:
            check_port_is_free(settings, paths)
        except MoeProxyError as error:
            return Finding("fail", "port", error.message, error.hint)
        free = f"{settings.port} is free" if settings.port else "start takes a free one"
        return Finding("ok", "port", f"{free}, no proxy is running")
    try:
        health = get_json(proxy, "/health")
    except NotRunningError as error:
        return Finding("fail", "proxy", error.message, error.hint)
    if health.get("status") == "ok":
        return Finding("ok", "proxy", f"ready at {proxy.url}, model {proxy.model}")
    return Finding(
        "warn", "proxy", f"not ready: {health.get('reason') or health.get('state')}", "moe-proxy logs"
    )
