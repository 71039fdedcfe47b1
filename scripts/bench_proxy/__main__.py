"""Measures what the proxy adds to llama-server, on a stand-in for it, and writes figures and a page.

The whole product is measured: ``moe-proxy start`` with its classifiers, its pager's control calls and the
planted model's header. Run it on a quiet machine: ``make bench-proxy``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from client import Ask, Timed, busy
from page import page
from proxy import Proxy, running
from states import crashes, disconnects, states

HERE = Path(__file__).parent
OPENAI, OLLAMA = "/v1/chat/completions", "/api/chat"


def latencies(proxy: Proxy, stream: bool, count: int, rounds: int) -> dict[str, Any]:
    """Milliseconds, direct and through both APIs, in alternation; the added ones per round."""
    which = 0 if stream else 1
    kinds: dict[str, tuple[Any, str]] = {
        "direct": (proxy.socket, OPENAI),
        "openai": (proxy.address, OPENAI),
        "ollama": (proxy.address, OLLAMA),
    }
    found: dict[str, list[list[float]]] = {name: [] for name in kinds}
    for _ in range(rounds + 1):
        for name, (address, path) in kinds.items():
            timed, requests = Timed(address), Ask(path, stream).requests()
            found[name].append([timed.ask(next(requests))[which] * 1e3 for _ in range(count)])
            timed.close()
    result: dict[str, Any] = {"requests_per_round": count, "rounds": rounds}
    for name, samples in found.items():
        # The first round warms everything up.
        marks = [(_quantile(one, 0.5), _quantile(one, 0.99)) for one in samples[1:]]
        result[name] = {
            "p50_ms": _spread([mark[0] for mark in marks]),
            "p99_ms": _spread([mark[1] for mark in marks]),
        }
    for name in ("openai", "ollama"):
        added = [
            (
                _quantile(through, 0.5) - _quantile(direct, 0.5),
                _quantile(through, 0.99) - _quantile(direct, 0.99),
            )
            for through, direct in zip(found[name][1:], found["direct"][1:], strict=True)
        ]
        result[name]["added_p50_ms"] = _spread([one[0] for one in added])
        result[name]["added_p99_ms"] = _spread([one[1] for one in added])
    return result


def rates(
    proxy: Proxy, ask: Ask, connections: int, total: int, rounds: int, per_request: int
) -> dict[str, Any]:
    """Requests or chunks per second of time, and per second of the proxy's CPU."""
    wall, cpu = [], []
    for _ in range(rounds + 1):
        began, spent = time.perf_counter(), proxy.cpu_s()
        asyncio.run(busy(proxy.address, [ask], connections, total))
        wall.append(total * per_request / (time.perf_counter() - began))
        cpu.append(total * per_request / (proxy.cpu_s() - spent))
    return {"connections": connections, "per_s": _spread(wall[1:]), "per_cpu_s": _spread(cpu[1:])}


def whole_streams(proxy: Proxy, streams: int, tokens: int) -> dict[str, Any]:
    """So many streams at once, each checked to the byte."""
    wrong = 0
    for path in (OPENAI, OLLAMA):
        made = asyncio.run(
            busy(proxy.address, [Ask(path, True, tokens, seed=1)], streams, streams, keep=True)
        )
        answers = [answer for one in made for answer in one.kept]
        texts = [_text(path, answer.unchunked()) for answer in answers]
        wrong += sum(text != " token" * tokens for text in texts) + (len(texts) != streams)
    return {"streams": streams, "chunks_each": tokens, "wrong": wrong}


def memory(proxy: Proxy, total: int) -> dict[str, Any]:
    """Resident MB after each twentieth of ``total`` requests of both APIs, whole and streamed."""
    asks = [Ask(OPENAI, False), Ask(OLLAMA, True), Ask(OPENAI, True), Ask(OLLAMA, False)]
    sizes = [proxy.resident_mb()]
    for _ in range(20):
        asyncio.run(busy(proxy.address, asks, 32, total // 20))
        sizes.append(proxy.resident_mb())
    return {"requests": total, "resident_mb": [round(size, 1) for size in sizes]}


def _text(path: str, body: bytes) -> str:
    said = []
    for line in body.splitlines():
        if path == OLLAMA:
            said.append(json.loads(line)["message"]["content"])
        elif line.startswith(b"data: {"):
            choices = json.loads(line[6:])["choices"]
            said.append((choices[0]["delta"].get("content") or "") if choices else "")
    return "".join(said)


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _spread(values: list[float]) -> list[float]:
    """Median, least, greatest."""
    return [round(value, 3) for value in (statistics.median(values), min(values), max(values))]


def _conditions() -> dict[str, Any]:
    model = next(
        (line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
         if line.startswith("model name")),
        platform.machine(),
    )  # fmt: skip
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": model,
        "cpus": psutil.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "load_before": [round(load, 2) for load in psutil.getloadavg()],
        "python": platform.python_version(),
        "aiohttp": aiohttp.__version__,
        "kernel": platform.release().partition("-")[0],
        "commit": subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],  # noqa: S607 - whichever git there is
            capture_output=True,
            text=True,
            check=False,
            cwd=HERE,
        ).stdout.strip(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=300, help="timed requests per round and kind")
    parser.add_argument("--requests", type=int, default=100_000, help="of the memory measurement")
    parser.add_argument("--json", type=Path, default=HERE / "results" / "proxy.json")
    parser.add_argument("--page", type=Path, default=HERE.parents[1] / "docs" / "bench-proxy.md")
    parser.add_argument("--only", nargs="*", help="measure these alone, and write nothing")
    given = parser.parse_args()
    result: dict[str, Any] = {"conditions": _conditions()}
    with running() as proxy:
        result["idle_mb"] = round(proxy.resident_mb(), 1)
        steps = {
            # What can fail comes first, what takes minutes last.
            "disconnect": lambda: {
                name: disconnects(proxy, path, given.samples // 6)
                for name, path in (("openai", OPENAI), ("ollama", OLLAMA))
            },
            "information": lambda: states(proxy, given.samples),
            "crash": lambda: crashes(proxy, 2, given.samples // 3),
            "whole": lambda: latencies(proxy, False, given.samples, given.rounds),
            "first_token": lambda: latencies(proxy, True, given.samples, given.rounds),
            "requests_openai": lambda: rates(proxy, Ask(OPENAI, False), 32, 2000, given.rounds, 1),
            "requests_ollama": lambda: rates(proxy, Ask(OLLAMA, False), 32, 2000, given.rounds, 1),
            "chunks_flood": lambda: rates(proxy, Ask(OLLAMA, True, 5000), 4, 16, given.rounds, 5000),
            "chunks_paced": lambda: rates(proxy, Ask(OLLAMA, True, 100, 1), 50, 200, given.rounds, 100),
            "chunks_paced_openai": lambda: rates(
                proxy, Ask(OPENAI, True, 100, 1), 50, 200, given.rounds, 100
            ),
            "streams": lambda: whole_streams(proxy, 200, 100),
            "memory": lambda: memory(proxy, given.requests),
        }
        for name, step in steps.items():
            if given.only and name not in given.only:
                continue
            result[name] = step()
            if name == "crash":
                result["crash"], crashed = result["crash"]
                result.setdefault("information", {})["crashed"] = crashed
            print(name, json.dumps(result[name]), flush=True)
    if given.only:
        return
    given.json.parent.mkdir(exist_ok=True)
    given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    given.page.write_text(page(result), encoding="utf-8")


if __name__ == "__main__":
    main()
