"""Owns ``moe-proxy doctor``: it looks at the machine, the engine, the model and the proxy, and reports."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

from moe_proxy import __version__
from moe_proxy.access import read_keys
from moe_proxy.calibration import calibration_path, read
from moe_proxy.cli import findings
from moe_proxy.cli.client import get_json, paths_of, post_json
from moe_proxy.cli.findings import Finding, Toolkit
from moe_proxy.cli.serve import check_port_is_free
from moe_proxy.config import Settings, load_settings
from moe_proxy.engine.build import engine_for
from moe_proxy.engine.cache import fault_of
from moe_proxy.engine.recipe import BuildRequest
from moe_proxy.engine.source import read_pin
from moe_proxy.engine.toolchain import cuda_toolkit
from moe_proxy.errors import ConfigError, MoeProxyError, NotRunningError
from moe_proxy.hardware import Hardware, probe
from moe_proxy.instance import RunningProxy, running_proxy
from moe_proxy.model.gguf_header import GgufHeader, read_header
from moe_proxy.model.layout import layout_of
from moe_proxy.served import model_file, plan_of
from moe_proxy.surroundings import look, read_speed
from moe_proxy.tuning import Way

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
_ANSWER_TIMEOUT_S = 60.0


@click.command(epilog="Example: moe-proxy doctor --model qwen3-30b-a3b-q4_k_m.gguf --gpu")
@click.option("--port", type=click.IntRange(0, 65535), help="port of the proxy")
@click.option("--model", type=click.Path(path_type=Path), help="also say whether this model fits")
@click.option("--gpu/--cpu", default=None, help="look at what start with the same flag would use")
@click.option("--json", "as_json", is_flag=True, help="print the findings as JSON")
def doctor(port: int | None, model: Path | None, gpu: bool | None, as_json: bool) -> None:
    """Check what a start needs, and ask a running proxy; exit code 1 when something fails.

    Each line is ok, a warning or a failure, with what to do about it.
    """
    settings = load_settings({"port": port, "model": model, "gpu": gpu})
    found: list[Finding] = []
    console = Console()
    for finding in _examined(settings):
        found.append(finding)
        if not as_json:
            _print(finding, console)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in found]))
    if any(finding.level == "fail" for finding in found):
        sys.exit(1)


def _print(finding: Finding, console: Console) -> None:
    cure = f": {finding.cure}" if finding.cure else ""
    console.print(f"[{_COLOURS[finding.level]}]{finding.level:4s}[/] {finding.subject:10s} ", end="")
    console.print(f"{finding.text}{cure}", markup=False, highlight=False, soft_wrap=True)


def _examined(settings: Settings) -> Iterator[Finding]:
    """All findings, each as soon as it is made."""
    hardware, around = probe(), look()
    yield Finding("ok", "moe-proxy", f"{__version__}, Python {sys.version.split()[0]}")
    engine = _engine(settings)
    yield engine
    yield from findings.memory(hardware, around)
    yield findings.locking(hardware)
    yield from findings.huge_pages(around)
    toolkit = cuda_toolkit()
    there = settings.engine is not None or (settings.gpu and engine.level == "ok")
    yield from findings.cards(
        hardware, around, settings.gpu, Toolkit(*toolkit) if toolkit is not None else None, there
    )
    header, about_model, expert_bytes = _model(settings, hardware)
    if hardware.gpus:
        yield findings.pinning(hardware, around, expert_bytes if settings.gpu else 0)
    yield from about_model
    path = header.files[0] if header else _largest_file(settings.cache_dir)
    yield findings.disk(read_speed(path) if path else None, header.size_bytes if header else 0)
    yield from _proxy(settings)


def _engine(settings: Settings) -> Finding:
    if settings.engine is not None:
        fault = fault_of(settings.engine)
        if fault:
            return Finding("fail", "engine", f"{settings.engine} does not start: {fault}", "correct --engine")
        return Finding("ok", "engine", f"{settings.engine}, as configured, starts")
    try:
        engine = engine_for(BuildRequest(cache_dir=settings.cache_dir, cuda=settings.gpu))
    except MoeProxyError as error:
        return Finding("fail", "engine", error.message, error.hint)
    if engine is not None:
        text = f"built, key {engine.key}, llama.cpp {read_pin().commit[:9]}"
        if fault := fault_of(engine.server):
            cure = f"delete {engine.folder}, then: moe-proxy build"
            return Finding("fail", "engine", f"{text}, and does not start: {fault}", cure)
        return Finding("ok", "engine", f"{text}, starts")
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        cure = "apt-get install g++, or moe-proxy build --import an engine"
        return Finding("fail", "engine", "not built, and there is no C++ compiler", cure)
    cache = settings.cache_dir
    folder = next((path for path in (cache, *cache.parents) if path.exists()), cache)
    if not os.access(folder, os.W_OK):
        cure = "set MOE_PROXY_CACHE_DIR to a folder you may write"
        return Finding("fail", "engine", f"not built, and {folder} cannot be written", cure)
    return Finding("warn", "engine", "not built yet", "moe-proxy build, or let start do it")


def _model(settings: Settings, hardware: Hardware) -> tuple[GgufHeader | None, list[Finding], int]:
    """The model's header, what is said of it, and the bytes of its experts."""
    if settings.model is None:
        return None, [], 0
    try:
        header = read_header(model_file(settings))
        layout = layout_of(header)
    except MoeProxyError as error:
        return None, [Finding("fail", "model", error.message, error.hint)], 0
    said = [findings.model(header, layout)]
    try:
        said.append(Finding("ok", "plan", plan_of(settings, header, layout, hardware).reason))
    except MoeProxyError as error:
        said.append(Finding("fail", "plan", error.message, error.hint))
    said.append(_calibration(settings, hardware, layout.fingerprint))
    return header, said, layout.total_expert_bytes


def _calibration(settings: Settings, hardware: Hardware, fingerprint: str) -> Finding:
    path = calibration_path(settings.state_dir, hardware, fingerprint, gpu=settings.gpu)
    found = read(path, hardware, fingerprint)
    if found is None:
        return Finding("ok", "tuning", "not tuned on this machine yet; moe-proxy tune does it")
    unused = "" if settings.calibrated else "; not used, since calibrated is off"
    trial = found.choice.trial
    rates = (f"{name} {rate / 1e9:.1f} GB/s" for name, rate in found.bandwidths_bytes_per_s.items() if rate)
    return Finding(
        "ok",
        "tuning",
        f"{Way(trial.threads, trial.patient, trial.pager).name}, {trial.decode_per_s:.1f} tokens/s"
        f" on {found.date[:10]}; {', '.join(rates)}{unused}",
    )


def _largest_file(folder: Path) -> Path | None:
    """What stands for a model that was not named: it would be read from this disk, too."""
    try:
        files = [(path.stat().st_size, path) for path in folder.glob("*/*") if path.is_file()]
    except OSError:
        return None
    return max(files)[1] if files else None


def _proxy(settings: Settings) -> Iterator[Finding]:
    paths = paths_of(settings)
    proxy = running_proxy(paths)
    if proxy is None:
        try:
            check_port_is_free(settings, paths)
        except MoeProxyError as error:
            yield Finding("fail", "port", error.message, error.hint)
            return
        free = f"{settings.port} is free" if settings.port else "start takes a free one"
        yield Finding("ok", "port", f"{free}, no proxy is running")
        return
    try:
        health = get_json(proxy, "/health")
    except NotRunningError as error:
        yield Finding("fail", "proxy", error.message, error.hint)
        return
    if health.get("status") != "ok":
        reason = health.get("reason") or health.get("state")
        yield Finding("warn", "proxy", f"not ready: {reason}", "moe-proxy logs")
        return
    yield Finding("ok", "proxy", f"ready at {proxy.url}, model {proxy.model}")
    yield _answer(settings, proxy)


def _answer(settings: Settings, proxy: RunningProxy) -> Finding:
    """One token from the model, by the way that every client goes."""
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    began_s = time.perf_counter()
    try:
        keys = read_keys(settings)
        answer = post_json(proxy, "/v1/chat/completions", body, _ANSWER_TIMEOUT_S, keys)
        tokens = answer["usage"]["completion_tokens"]
    except ConfigError as error:
        return Finding("warn", "answer", error.message, error.hint)
    except MoeProxyError as error:
        return Finding("fail", "answer", error.message, error.hint)
    except (KeyError, TypeError) as error:
        return Finding(
            "fail", "answer", f"the answer is no chat completion: it lacks {error}", "moe-proxy logs"
        )
    return Finding(
        "ok", "answer", f"{tokens} token in {time.perf_counter() - began_s:.2f} s, through the proxy"
    )
