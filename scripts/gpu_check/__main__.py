"""Compares the pager with stock llama.cpp at equal VRAM on one GPU, and writes what it saw as JSON.

Usage: python scripts/gpu_check ENGINE MODEL.gguf RESULT.json [--shares 0,10,20,40,60] [--runs 5] [--commit C]

ENGINE is a folder with a llama-server built for CUDA with the pager, MODEL a planted large model
(planted_large.py). For each share of the experts the paged server and the stock placement that takes as much
VRAM (``-ncmoe``, pinned host memory, all cores) run side by side and are asked in turn. Greedy logits of each
paged server are compared with those of stock llama.cpp with everything in VRAM. Decoding samples at
temperature 0.8: a greedy planted model soon repeats itself. ``page.py`` makes docs/benchmarks.md of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from arms import MIB, Arm, Bench, Server, card_used_mib, counted, paged, running, stock_all, stock_split

SHORT = "def quicksort(xs): { return [x for x in xs if x < p]; } // sort_list(a,b,c)"
DECODE_TOKENS = 192
GREEDY_TOKENS = 200
RESTLESS_TOKENS = 2000
PREFILL_TOKENS = 2040
WARM_UPS = 3
# What the backend takes beyond weights, context and frames while it computes: the pager's default.
RESERVE_BYTES = 256 * MIB


def logits(server: Server, tokens: int = GREEDY_TOKENS, temperature: float = 0.0) -> list[Any]:
    """Ids and log-probabilities of the 20 best tokens at each step of a completion."""
    answer = server.complete(SHORT, tokens, temperature=temperature, seed=1, n_probs=20)
    steps = answer["completion_probabilities"]
    return [[(top["id"], top["logprob"]) for top in step["top_logprobs"]] for step in steps]


def decode(server: Server, seed: int) -> float:
    """Tokens per second of one sampled completion; only these tokens are computed if the prompt is known."""
    answer = server.complete(SHORT, DECODE_TOKENS, temperature=0.8, seed=seed, cache_prompt=True)
    return float(answer["timings"]["predicted_per_second"])


def prefill(server: Server, text: str) -> float:
    """Tokens per second of one long prompt."""
    return float(server.complete(text, 1, temperature=0)["timings"]["prompt_per_second"])


def first_token(server: Server, run: int) -> float:
    """Milliseconds until the first token of a prompt of two dozen tokens."""
    return float(server.complete(SHORT[run:], 1, temperature=0)["timings"]["prompt_ms"])


def long_text(server: Server, root: Path) -> str:
    """This project's own source, cut to ``PREFILL_TOKENS`` tokens or a little less: it must fit one batch."""
    source = "".join(path.read_text() for path in sorted((root / "moe_proxy" / "engine").glob("*.py")))
    length = 3 * PREFILL_TOKENS
    for _ in range(8):
        tokens = server.complete(source[:length], 0)["timings"]["prompt_n"]
        if 0.97 * PREFILL_TOKENS <= tokens <= PREFILL_TOKENS:
            break
        length = int(length / tokens * 0.985 * PREFILL_TOKENS)
    return source[:length]


def experts_state(server: Server) -> dict[str, Any]:
    """What the pager says of itself, and its counters."""
    about, counters = server.get("/experts"), server.get("/experts/stats")
    return {"tiers": about["tiers"], "reasons": about["reasons"], "counters": counters}


@contextmanager
def warmed(bench: Bench, arm: Arm, port: int, text: str) -> Iterator[Server]:
    """A server that has seen every kind of work, so that its VRAM is what it will stay at."""
    before = card_used_mib()
    with running(bench, arm, port) as server:
        prefill(server, text)
        for seed in range(WARM_UPS):
            decode(server, seed)
        server.vram_mib = card_used_mib() - before
        yield server


def measure(servers: list[Server], text: str, runs: int) -> list[dict[str, Any]]:
    """Medians and all values of each server; the servers are asked in turn."""
    rows: list[dict[str, Any]] = [
        {"decode": [], "prefill": [], "first_token_ms": [], "hits": []} for _ in servers
    ]
    for seed in range(100, 100 + runs):
        for server, row in zip(servers, rows, strict=True):
            before = _hits(server)
            row["decode"].append(round(decode(server, seed), 1))
            after = _hits(server)
            if before is not None and after is not None:
                row["hits"].append(round((after[0] - before[0]) / max(1, after[1] - before[1]), 3))
    for run in range(runs):
        for server, row in zip(servers, rows, strict=True):
            row["prefill"].append(round(prefill(server, text[run:])))
            row["first_token_ms"].append(round(first_token(server, run), 1))
    for server, row in zip(servers, rows, strict=True):
        row["decode_median"] = statistics.median(row["decode"])
        row["prefill_median"] = statistics.median(row["prefill"])
        row["prefill_first_token_ms"] = round(PREFILL_TOKENS / row["prefill_median"] * 1000, 1)
        row["first_token_ms_median"] = statistics.median(row["first_token_ms"])
        row["vram_mib"] = server.vram_mib
        row["load_s"] = round(server.load_s, 1)
    return rows


def _hits(server: Server) -> tuple[int, int] | None:
    try:
        counters = server.get("/experts/stats")
    except OSError:
        return None
    return counters["hits"], counters["picks"]


def best_threads(bench: Bench, text: str) -> tuple[int, int]:
    """Threads with which stock decodes fastest without an expert in VRAM, and its VRAM in bytes."""
    cores = os.cpu_count() or 1
    speeds = {}
    for threads in sorted({cores, max(1, cores // 2)}):
        with running(bench, stock_split(99, threads), 18080) as server:
            server.complete(SHORT, 32, temperature=0.8, seed=1)
            answer = server.complete(SHORT, 96, temperature=0.8, seed=2)
            speeds[threads] = float(answer["timings"]["predicted_per_second"])
    best = max(speeds, key=lambda threads: speeds[threads])
    with warmed(bench, stock_split(99, best), 18080, text) as server:
        return best, server.vram_mib * MIB


def four_slots(bench: Bench, arm: Arm, port: int) -> dict[str, float]:
    """Tokens per second of one request and of four at once, after as many warm-ups."""
    with running(bench, replace(arm, slots=4), port) as server:
        for seed in range(WARM_UPS):
            decode(server, seed)
        single = statistics.median(decode(server, seed) for seed in range(10, 13))
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda seed: decode(server, seed), range(20, 24)))
            each = list(pool.map(lambda seed: decode(server, seed), range(30, 34)))
    return {"one": round(single, 1), "four": round(sum(each), 1)}


def conditions(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the figures hold for."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,pcie.link.gen.max,pcie.link.width.max"]
    card = subprocess.run([*query, "--format=csv,noheader"], capture_output=True, text=True, check=True)
    cpu = next(
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
    )
    return {
        "gpu": card.stdout.strip(),
        "cpu": cpu.partition(":")[2].strip(),
        "cores": os.cpu_count(),
        "commit": arguments.commit,
        "command": f"scripts/gpu_check ENGINE planted-large.gguf RESULT --shares {arguments.shares}"
        f" --runs {arguments.runs}",
        "model": f"{arguments.model.name}, {arguments.model.stat().st_size / 1e9:.1f} GB",
        "decode_tokens": DECODE_TOKENS,
        "prefill_tokens": PREFILL_TOKENS,
        "runs": arguments.runs,
        "warm_ups": WARM_UPS,
    }


def main() -> None:
    """Measure all rows; each is written to the result as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--shares", default="0,10,20,40,60")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    root = Path(__file__).resolve().parents[2]
    result: dict[str, Any] = {"conditions": conditions(arguments), "rows": []}

    def keep() -> None:
        part = arguments.result.with_suffix(".part")
        part.write_text(json.dumps(result, indent=1))
        part.replace(arguments.result)

    with tempfile.TemporaryDirectory() as logs:
        bench = Bench(arguments.engine, arguments.model, Path(logs))
        with running(bench, stock_all(), 18080) as stock:
            reference = logits(stock)
            sampled = logits(stock, RESTLESS_TOKENS, 0.8)
            text = long_text(stock, root)
        with (
            warmed(bench, stock_all(), 18080, text) as stock,
            warmed(bench, counted(), 18081, text) as watched,
        ):
            first, second = measure([stock, watched], text, arguments.runs)
            row = {"share": 100, "stock": {"name": stock_all().name, **first}, "paged": second}
            row["identical"] = logits(watched) == reference
            expert_bytes = watched.get("/experts")["tiers"]["ram"]["total_bytes"]
            result["rows"].append(row)
            keep()
        threads, base_bytes = best_threads(bench, text)
        result["conditions"]["stock_threads"] = threads
        layers = _layers(arguments.model)
        staging_bytes = 2 * expert_bytes // layers // 3

        def budget(share: int) -> int:
            return base_bytes + staging_bytes + RESERVE_BYTES + expert_bytes * share // 100

        for share in [int(value) for value in arguments.shares.split(",")]:
            fitting = int((budget(share) - base_bytes) / (expert_bytes / layers))
            rival = stock_split(max(0, layers - fitting), threads)
            try:
                with (
                    warmed(bench, paged(budget(share)), 18080, text) as own,
                    warmed(bench, rival, 18081, text) as other,
                ):
                    identical = logits(own) == reference
                    mine, theirs = measure([own, other], text, arguments.runs)
                    mine |= experts_state(own)
            except RuntimeError as error:
                print(error, file=sys.stderr)
                continue
            row = {"share": share, "budget_bytes": budget(share), "paged": mine, "identical": identical}
            result["rows"].append(row | {"stock": {"name": rival.name, **theirs}})
            keep()
        restless = paged(budget(40), MOE_PAGER_HORIZON="1000000", MOE_PAGER_HALF_LIFE="8")
        with running(bench, restless, 18080) as server:
            moved = server.get("/experts/stats")["promotions"]
            identical = logits(server, RESTLESS_TOKENS, 0.8) == sampled
            moved = server.get("/experts/stats")["promotions"] - moved
        result["restless"] = {"identical": identical, "promotions": moved, "tokens": RESTLESS_TOKENS}
        keep()
        result["slots"] = {"stock, all in VRAM": four_slots(bench, stock_all(), 18080)}
        for share in (40, 60):
            result["slots"][f"paged, {share} %"] = four_slots(bench, paged(budget(share)), 18080)
            keep()


def _layers(model: Path) -> int:
    """Blocks of a planted model: its file names none, but each has one tensor of that name."""
    with model.open("rb") as file:
        head = file.read(64 * MIB)
    return head.count(b".ffn_gate_inp.weight")


if __name__ == "__main__":
    main()
