"""Measure what a prior is worth, cold: measure_prior.py ENGINE [--prompts N] [--seeds N] [--budget PERCENT]

Each arm starts a fresh engine on the shipped model with a small RAM budget, and generates 300 tokens of a
held-out prompt in exact windows, sampled with each seed. In an arm named "alone" the prior weighs so much
that no count moves anything. The engine always counts the prompt's prefill; "seeding" is that without a
prior. Writes docs/prior.json, docs/prior.md with a table, and docs/pictures/prior.svg. With --report alone
the two are made anew from the result.
"""

import argparse
import asyncio
import itertools
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from provenance import judged

from moe_proxy.config import load_settings
from moe_proxy.domains.base import DOMAINS
from moe_proxy.engine.control import EngineControl
from moe_proxy.files import write_text
from moe_proxy.model.gguf_header import read_header
from moe_proxy.model.layout import ModelLayout, layout_of
from moe_proxy.model.planted import planted_path
from moe_proxy.resources import data_path
from moe_proxy.routing.collect import held_out_prompts
from moe_proxy.routing.prior import Prior, mixture_prior
from moe_proxy.routing.router_map import RouterMap, load

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "docs" / "prior.json"
WINDOWS = (("1–50", 50), ("51–200", 150), ("steady", 100))
ALONE = 1e9
KAPPAS = (2, 8, 32, 256)
ARMS = (
    "none",
    "persisted alone",
    "domain prior alone",
    "wrong domain alone",
    "prefill seeding alone",
    *(f"domain prior and seeding, kappa {kappa}" for kappa in KAPPAS),
    *(f"wrong domain and seeding, kappa {kappa}" for kappa in KAPPAS),
)
START_S = 60.0
BAR, ROW, LABEL = 110, 20, 270

Window = tuple[int, int, int, float]
"""Hits, picks, promotions, tokens per second."""


def uniform(router_map: RouterMap) -> Prior:
    """A prior that knows nothing."""
    model = router_map.model
    row = tuple((expert, model.experts_used / model.experts) for expert in range(model.experts))
    return Prior("uniform", ALONE, dict.fromkeys(model.layers, row))


def prior_of(arm: str, router_map: RouterMap, domain: str) -> Prior | None:
    """The prior an arm pushes before the prompt. Another domain is one that stands further on in the list."""
    other = DOMAINS[(DOMAINS.index(domain) + 4) % len(DOMAINS)]
    before = DOMAINS[(DOMAINS.index(domain) + 1) % len(DOMAINS)]
    if arm.startswith("prefill"):
        return None
    if arm == "none":
        return uniform(router_map)
    kappa = ALONE if arm.endswith("alone") else float(arm.rsplit(" ", 1)[1])
    chosen = {"persisted": before, "domain": domain, "wrong": other}[arm.split(" ", 1)[0]]
    return mixture_prior(router_map, ({chosen: 1.0},), kappa)


@contextmanager
def engine(server: Path, model: Path, layout: ModelLayout, percent: float) -> Iterator[Path]:
    """A fresh llama-server whose experts have ``percent`` of their size in RAM; its socket."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("wb") as log:
        socket = Path(folder) / "e.sock"
        budget = int(layout.total_expert_bytes * percent / 100)
        argv = [server, "--host", socket, "--model", model, "--ctx-size", "1024", "--parallel", "1"]
        argv += ["--threads", "1", "--cpu-moe", "--load-mode", "mmap"]
        env = os.environ | {"MOE_PAGER": "1", "MOE_PAGER_RAM_BYTES": str(budget)}
        process = subprocess.Popen([str(word) for word in argv], env=env, stdout=log, stderr=log)
        try:
            yield socket
        finally:
            process.terminate()
            process.wait(20)


async def measured(socket: Path, prior: Prior | None, prompt: str, seed: int) -> list[Window]:
    """What each window of one answer saw."""
    connector = aiohttp.UnixConnector(str(socket), force_close=True)
    async with EngineControl(socket) as control, aiohttp.ClientSession(connector=connector) as session:

        async def post(path: str, body: Mapping[str, object]) -> dict[str, Any]:
            async with session.post(f"http://engine{path}", json=body) as response:
                answer: dict[str, Any] = await response.json()
                if response.status != 200:
                    raise SystemExit(f"{path}: {answer}")
                return answer

        async def settled() -> None:
            while (await control.experts())["mover"]["pending"]:  # noqa: ASYNC110, another process settles
                await asyncio.sleep(0.01)

        deadline = time.monotonic() + START_S
        while True:
            try:
                async with session.get("http://engine/health") as response:
                    if response.status == 200:
                        break
            except aiohttp.ClientError:
                pass
            if time.monotonic() > deadline:
                raise SystemExit("the engine did not start")
            await asyncio.sleep(0.05)
        if prior is not None:
            await control.push_prior(prior.to_json())
            await settled()
        tokens = (await post("/tokenize", {"content": prompt, "add_special": True}))["tokens"]
        body = {
            "temperature": 1.0,
            "seed": seed,
            "cache_prompt": True,
            "ignore_eos": True,
            "return_tokens": True,
        }
        tokens += (await post("/completion", {**body, "prompt": tokens, "n_predict": 1}))["tokens"]
        found: list[Window] = []
        for _, length in WINDOWS:
            before = await control.stats()
            answer = await post("/completion", {**body, "prompt": tokens, "n_predict": length})
            delta = (await control.stats(before["snapshot"]))["delta"]
            tokens += answer["tokens"]
            found.append(
                (
                    delta["hits"],
                    delta["picks"],
                    delta["promotions"],
                    round(answer["timings"]["predicted_per_second"], 1),
                )
            )
        return found


def hit_rates(runs: Sequence[Sequence[Window]]) -> list[float]:
    """Share of hits in the picks of each window."""
    return [sum(r[w][0] for r in runs) / sum(r[w][1] for r in runs) for w in range(len(WINDOWS))]


def report(result: Mapping[str, Any]) -> str:
    """The table of a result."""
    arms: Mapping[str, list[list[Window]]] = result["arms"]
    names = [name for name, _ in WINDOWS]
    lines = [
        "# What a prior is worth",
        "",
        f"Generated by `scripts/measure_prior.py` from `docs/prior.json`: {result['prompts']} held-out"
        f" prompts, {result['seeds']} sampled answers of each, model {result['model']},"
        f" {result['budget_percent']:g} % of the experts in RAM, each answer on a fresh engine;"
        f" {result['machine']}, load average {result['load_average'][0]:.1f} before and"
        f" {result['load_average'][1]:.1f} after, {result['judged']}, {result['date']}.",
        "",
        '"Alone": the prior outweighs every count, so nothing moves after it. The engine cannot leave out'
        ' the counts of the prefill, so "none" is a prior that knows nothing, alone. "Persisted" is the'
        ' prior of the domain that was served before, and "wrong" that of an unrelated one. Kappa is the'
        " weight of the prior in tokens. Plus and minus is the standard error over the answers.",
        "",
        "Hit rates are counts and do not depend on how busy the machine is. Speeds do: they are medians, and"
        " where all experts fit into the page cache, as here, they say little even on an idle machine.",
        "",
        f"| arm | {' | '.join([f'hits {name}' for name in names] + [f't/s {name}' for name in names])} |",
        "|---" * (1 + 2 * len(names)) + "|",
    ]
    for arm, runs in arms.items():
        each = np.array([[hits / picks for hits, picks, *_ in run] for run in runs])
        errors = each.std(axis=0, ddof=1) / np.sqrt(len(runs))
        cells = [
            f"{100 * hit:.1f} ± {100 * error:.1f} %"
            for hit, error in zip(hit_rates(runs), errors, strict=True)
        ]
        cells += [f"{np.median([run[w][3] for run in runs]):.0f}" for w in range(len(names))]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", "![Hit rates of the arms](pictures/prior.svg)", ""])


def picture(result: Mapping[str, Any]) -> str:
    """The hit rates of a result as bars: a line an arm, a column a window."""
    width, height = LABEL + len(WINDOWS) * (BAR + 60), ROW * (len(result["arms"]) + 1) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"'
        ' font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for column, (name, _) in enumerate(WINDOWS):
        parts.append(f'<text x="{LABEL + column * (BAR + 60)}" y="16">hits, tokens {name}</text>')
    for line, (arm, runs) in enumerate(result["arms"].items(), 1):
        y = line * ROW + 16
        colour = "#c44" if arm.startswith("wrong") else "#48a"
        parts.append(f'<text x="4" y="{y}">{arm}</text>')
        for column, rate in enumerate(hit_rates(runs)):
            x = LABEL + column * (BAR + 60)
            parts.append(f'<rect x="{x}" y="{y - 11}" width="{BAR * rate:.1f}" height="13" fill="{colour}"/>')
            parts.append(f'<text x="{x + BAR * rate + 4:.1f}" y="{y}">{100 * rate:.0f} %</text>')
    return "\n".join([*parts, "</svg>", ""])


def write_report() -> None:
    """Make the table and the picture from the result that lies in docs."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    write_text(ROOT / "docs" / "pictures" / "prior.svg", picture(result))
    write_text(ROOT / "docs" / "prior.md", report(result))
    print(report(result))


def main() -> None:
    """Run all arms, alternated over the prompts, and write result and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", nargs="?", type=Path)
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--prompts", type=int, default=1, help="held-out prompts per domain")
    parser.add_argument("--seeds", type=int, default=1, help="answers per prompt")
    parser.add_argument("--budget", type=float, default=30.0, help="percent of the experts in RAM")
    arguments = parser.parse_args()
    if arguments.report:
        write_report()
        return
    if arguments.engine is None:
        parser.error("name the llama-server to measure")
    load_before = os.getloadavg()[2]
    model = planted_path(load_settings({}).cache_dir)
    layout = layout_of(read_header(model))
    router_map = load(data_path("maps") / "planted-moe.json")
    arms: dict[str, list[list[Window]]] = {arm: [] for arm in ARMS}
    prompts = [
        (domain, prompt)
        for domain, found in held_out_prompts().items()
        for prompt in found[: arguments.prompts]
    ]
    for (domain, prompt), seed, arm in itertools.product(prompts, range(arguments.seeds), ARMS):
        with engine(arguments.engine, model, layout, arguments.budget) as socket:
            arms[arm].append(asyncio.run(measured(socket, prior_of(arm, router_map, domain), prompt, seed)))
    result = {
        "model": layout.name,
        "prompts": len(prompts),
        "seeds": arguments.seeds,
        "budget_percent": arguments.budget,
        "load_average": [load_before, os.getloadavg()[2]],
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "judged": judged(data_path("maps") / "planted-moe.json", data_path("native"), data_path("patches")),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "arms": arms,
    }
    write_text(RESULT, json.dumps(result) + "\n")
    write_report()


if __name__ == "__main__":
    main()
