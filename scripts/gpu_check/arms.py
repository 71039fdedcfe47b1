"""Owns one llama-server under measurement: how it is started, asked and stopped.

Standard library alone: it runs on machines that have a GPU and little else.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_READY_TIMEOUT_S = 300
MIB = 2**20


@dataclass(frozen=True)
class Bench:
    """What all arms of a run share. ``context`` is in tokens, for all slots together: it takes VRAM."""

    engine: Path
    model: Path
    logs: Path
    context: int = 4096
    batch: int = 2048


@dataclass(frozen=True)
class Arm:
    """One way to place the experts: flags and environment on top of what all arms share."""

    name: str
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None
    slots: int = 1


def stock_all() -> Arm:
    """Stock llama.cpp with everything in VRAM."""
    return Arm("stock, all in VRAM")


def counted() -> Arm:
    """Everything in VRAM, with the pager counting."""
    return Arm("all in VRAM, counted", environment={"MOE_PAGER": "1"})


def stock_split(layers_on_cpu: int, threads: int) -> Arm:
    """Stock llama.cpp with the experts of that many layers computed by the CPU, from pinned memory."""
    flags = ("-ncmoe", str(layers_on_cpu), "--load-mode", "none", "--threads", str(threads))
    return Arm(f"stock, -ncmoe {layers_on_cpu}", flags)


def paged(vram_bytes: int, **variables: str) -> Arm:
    """The pager with so much VRAM for the whole process."""
    environment = {
        "MOE_PAGER": "1",
        "MOE_PAGER_VRAM_BYTES": str(vram_bytes),
        **variables,
    }
    return Arm(f"paged, {vram_bytes / 1e9:.2f} GB", ("--load-mode", "mmap"), environment)


class Server:
    """A running llama-server; ``vram_mib`` is what this process takes, once somebody has measured it."""

    def __init__(self, port: int, load_s: float) -> None:
        self._port, self.load_s = port, load_s
        self.vram_mib = 0

    def get(self, path: str) -> Any:
        """A GET's JSON."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=60) as answer:
            return json.load(answer)

    def complete(self, prompt: str, tokens: int, **body: object) -> Any:
        """One completion without cache and without end, as JSON."""
        request = {"prompt": prompt, "n_predict": tokens, "ignore_eos": True, "cache_prompt": False, **body}
        return self.post("/completion", request)

    def post(self, path: str, body: object) -> Any:
        """A POST's JSON."""
        call = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(call, timeout=300) as answer:
            return json.load(answer)


def card_used_mib() -> int:
    """VRAM in use on the first card, by everybody, in MiB."""
    return int(_lines(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"])[0])


def _lines(argv: list[str]) -> list[str]:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip().splitlines()


@contextmanager
def running(bench: Bench, arm: Arm, port: int) -> Iterator[Server]:
    """The arm's server, ready; stopped at the end. Raises RuntimeError with its last lines if it dies."""
    variables = dict(os.environ) | dict(arm.environment or {})
    if "MOE_PAGER_VRAM_BYTES" in variables:
        variables["MOE_PAGER_VRAM_OTHERS_BYTES"] = str(card_used_mib() * MIB)
    argv = [str(bench.engine / "llama-server"), "--model", str(bench.model), "--port", str(port)]
    argv += ["--ctx-size", str(bench.context), "--parallel", str(arm.slots)]
    argv += ["--batch-size", str(bench.batch), "--ubatch-size", str(bench.batch), "--flash-attn", "on"]
    argv += ["--gpu-layers", "99", "--fit", "off", *arm.flags]
    log_path = bench.logs / f"{port}.log"
    started = time.monotonic()
    with log_path.open("wb") as log, subprocess.Popen(argv, env=variables, stdout=log, stderr=log) as process:
        try:
            _wait_ready(process, port, arm, log_path)
            yield Server(port, time.monotonic() - started)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_ready(process: subprocess.Popen[bytes], port: int, arm: Arm, log: Path) -> None:
    end = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < end:
        if process.poll() is not None:
            tail = log.read_text(errors="replace").splitlines()[-8:]
            raise RuntimeError(
                f"{arm.name}: llama-server ended with {process.returncode}\n" + "\n".join(tail)
            )
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"{arm.name}: llama-server was not ready within {_READY_TIMEOUT_S} s")
