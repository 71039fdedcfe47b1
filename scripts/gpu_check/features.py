"""Compares the pager with stock llama.cpp on small models of every kind, log-probability by log-probability.

Usage: python scripts/gpu_check/features.py ENGINE MODELS RESULT.json

MODELS is a folder that planted_kinds.py has filled. Each model is run twice: by stock llama.cpp with
everything in VRAM, and paged, with frames for a third of its experts and a mover that is made to move all
the time. Both are asked the same: 2,000 sampled tokens (the pager reads in mat-vec kernels), and prompts of a
dozen and of several hundred tokens (gathered and copied batches). Then the same for what a server can do
besides: shift its context, and speculate with a draft model that is paged as well.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from arms import Arm, Bench, Server, paged, running, stock_all

TOKENS = 2000
_AT_ONCE = 5  # cases: nothing is timed
_ROOM_BYTES = 8_000_000_000  # more than any of the models takes: the frames are limited by hand
_LONG = "write a loop over the lines of a file and count the words in each; " * 40


@dataclass(frozen=True)
class Case:
    """A model, and what the server is started with beside it."""

    name: str
    model: str
    flags: tuple[str, ...] = ()
    context: int = 4096


def _cases(models: Path) -> list[Case]:
    kinds = [Case(path.stem, path.stem) for path in sorted(models.glob("*.gguf"))]
    draft = (
        "--spec-draft-model",
        str(models / "top-1.gguf"),
        "--spec-draft-ngl",
        "99",
        "--spec-type",
        "draft-simple",
    )
    return [
        *kinds,
        Case("context shift", "mixed", ("--context-shift",), context=512),
        Case("draft model", "mixed", draft),
    ]


def _answers(server: Server, tokens: int, context: int) -> list[Any]:
    """Ids and log-probabilities of the 20 best tokens at each step, of three requests."""
    requests = (
        ("sort a list", tokens),
        ("write a loop over the lines of a file, and count the words in each of them", 4),
        (_LONG[: 2 * context], 4),  # characters
    )
    result = []
    for prompt, count in requests:
        answer = server.complete(prompt, count, temperature=0.8, seed=3, n_probs=20)
        steps = answer["completion_probabilities"]
        result.append([[(top["id"], top["logprob"]) for top in step["top_logprobs"]] for step in steps])
    return result


def _check(bench: Bench, case: Case, port: int) -> dict[str, Any]:
    tokens = TOKENS if case.context > TOKENS else 2 * case.context
    restless = paged(_ROOM_BYTES, MOE_PAGER_HORIZON="1000000", MOE_PAGER_HALF_LIFE="8")
    with running(bench, _with(stock_all(), case.flags), port) as stock:
        wanted = _answers(stock, tokens, case.context)
    with running(bench, _with(restless, case.flags), port) as server:
        total = server.get("/experts")["tiers"]["ram"]["total_bytes"]
        server.post("/experts/budget", {"vram_bytes": total // 3})
        before = server.get("/experts/stats")
        got = _answers(server, tokens, case.context)
        after = server.get("/experts/stats")
        reasons = server.get("/experts")["reasons"]
    moved = {key: after[key] - before[key] for key in ("hits", "misses", "promotions", "demotions")}
    return {
        "name": case.name,
        "tokens": sum(len(steps) for steps in got),
        "identical": got == wanted,
        **moved,
        "reasons": reasons,
    }


def _with(arm: Arm, flags: tuple[str, ...]) -> Arm:
    return replace(arm, flags=(*arm.flags, *flags))


def _try(engine: Path, models: Path, logs: Path, case: Case, port: int) -> dict[str, Any]:
    bench = Bench(engine, models / f"{case.model}.gguf", logs, context=case.context, batch=512)
    try:
        row = _check(bench, case, port)
    except (OSError, RuntimeError, KeyError) as error:
        row = {"name": case.name, "identical": False, "error": str(error)}
    print(row, file=sys.stderr, flush=True)
    return row


def main() -> None:
    """Check all cases; exit with 1 if one differs, or if nothing missed or moved."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", type=Path)
    parser.add_argument("models", type=Path)
    parser.add_argument("result", type=Path)
    arguments = parser.parse_args()
    cases = _cases(arguments.models)
    with tempfile.TemporaryDirectory() as logs, ThreadPoolExecutor(_AT_ONCE) as pool:
        started = [
            pool.submit(_try, arguments.engine, arguments.models, Path(logs), case, 18080 + number)
            for number, case in enumerate(cases)
        ]
        rows = [future.result() for future in started]
    part = arguments.result.with_suffix(".part")
    part.write_text(json.dumps(rows, indent=1))
    part.replace(arguments.result)
    sys.exit(0 if all(row["identical"] for row in rows) else 1)


if __name__ == "__main__":
    main()
