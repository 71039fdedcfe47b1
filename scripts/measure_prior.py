"""Measure what a prior is worth, cold: measure_prior.py ENGINE [--prompts N] [--budget PERCENT]

Each arm starts a fresh engine on the shipped model with a small RAM budget, and generates 300 tokens of a
held-out prompt in exact windows. In an arm named "alone" the prior weighs so much that no count moves
anything. The engine always counts the prompt's prefill; "seeding" is that without a prior. Writes
docs/prior.json, and docs/prior.md with a table and a picture.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

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
WINDOWS = (("1–50", 50), ("51–200", 150), ("steady", 100))
ALONE = 1e9
KAPPA = 256.0
ARMS = (
    "none",
    "persisted alone",
    "domain prior alone",
    "prefill seeding alone",
    "domain prior and seeding",
    "wrong domain alone",
    "wrong domain and seeding",
)
START_S = 60.0


def uniform(router_map: RouterMap) -> Prior:
    """A prior that knows nothing."""
    model = router_map.model
    row = tuple((expert, model.experts_used / model.experts) for expert in range(model.experts))
    return Prior("uniform", ALONE, dict.fromkeys(model.layers, row))


def prior_of(arm: str, router_map: RouterMap, domain: str) -> Prior | None:
    """The prior an arm pushes before the prompt. Another domain is one that stands further on in the list."""
    other = DOMAINS[(DOMAINS.index(domain) + 4) % len(DOMAINS)]
    before = DOMAINS[(DOMAINS.index(domain) + 1) % len(DOMAINS)]
    kappa = ALONE if arm.endswith("alone") else KAPPA
    if arm == "none":
        return uniform(router_map)
    if arm.startswith("prefill"):
        return None
    chosen = {"persisted": before, "domain": domain, "wrong": other}[arm.split(" ", 1)[0]]
    return mixture_prior(router_map, ({chosen: 1.0},), kappa)


@contextmanager
def engine(server: Path, model: Path, layout: ModelLayout, percent: float) -> Iterator[Path]:
    """A fresh llama-server whose experts have ``percent`` of their size in RAM; its socket."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("wb") as log:
        socket = Path(folder) / "e.sock"
        budget = int(layout.total_expert_bytes * percent / 100)
        argv = [server, "--host", socket, "--model", model, "--ctx-size", "1024", "--parallel", "1"]
        argv += ["--threads", "2", "--cpu-moe", "--load-mode", "mmap"]
        env = os.environ | {"MOE_PAGER": "1", "MOE_PAGER_RAM_BYTES": str(budget)}
        process = subprocess.Popen([str(word) for word in argv], env=env, stdout=log, stderr=log)
        try:
            yield socket
        finally:
            process.terminate()
            process.wait(20)


async def measured(socket: Path, prior: Prior | None, prompt: str) -> list[dict[str, float]]:
    """Hits, picks and seconds of each window of one answer."""
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
            "seed": 7,
            "cache_prompt": True,
            "ignore_eos": True,
            "return_tokens": True,
        }
        tokens += (await post("/completion", {**body, "prompt": tokens, "n_predict": 1}))["tokens"]
        found = []
        for _, length in WINDOWS:
            before = await control.stats()
            answer = await post("/completion", {**body, "prompt": tokens, "n_predict": length})
            delta = (await control.stats(before["snapshot"]))["delta"]
            tokens += answer["tokens"]
            found.append(
                {
                    "hits": delta["hits"],
                    "picks": delta["picks"],
                    "promotions": delta["promotions"],
                    "tokens_per_s": answer["timings"]["predicted_per_second"],
                }
            )
        return found


def report(result: Mapping[str, Any]) -> str:
    """The table and the picture of a result."""
    arms: Mapping[str, list[list[dict[str, float]]]] = result["arms"]
    names = [name for name, _ in WINDOWS]
    lines = [
        "# What a prior is worth",
        "",
        "Generated by `scripts/measure_prior.py` from `docs/prior.json`:"
        f" {result['prompts']} held-out prompts, model {result['model']},"
        f" {result['budget_percent']:g} % of the experts in RAM, {result['machine']},"
        f" commit {result['commit']}, {result['date']}.",
        "",
        '"Alone": the prior outweighs every count, so nothing moves after it. The engine cannot leave out'
        ' the counts of the prefill, so "none" is a prior that knows nothing, alone. "Persisted" is the'
        " prior of the domain that was served before. Speeds are medians; where all experts fit into the"
        " page cache they say little.",
        "",
        f"| arm | {' | '.join([f'hits {name}' for name in names] + [f't/s {name}' for name in names])} |",
        "|---" * (1 + 2 * len(names)) + "|",
    ]
    rates = {}
    for arm, runs in arms.items():
        hits = [sum(r[w]["hits"] for r in runs) / sum(r[w]["picks"] for r in runs) for w in range(len(names))]
        speeds = [float(np.median([run[w]["tokens_per_s"] for run in runs])) for w in range(len(names))]
        rates[arm] = hits
        cells = [f"{100 * hit:.1f} %" for hit in hits] + [f"{speed:.0f}" for speed in speeds]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    lines += ["", "Hit rate of tokens 1–50:", "", "```"]
    lines += [f"{arm:26s} {'█' * round(50 * hits[0])} {100 * hits[0]:.0f} %" for arm, hits in rates.items()]
    return "\n".join([*lines, "```", ""])


def main() -> None:
    """Run all arms, alternated over the prompts, and write result and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--prompts", type=int, default=1, help="held-out prompts per domain")
    parser.add_argument("--budget", type=float, default=30.0, help="percent of the experts in RAM")
    arguments = parser.parse_args()
    model = planted_path(load_settings({}).cache_dir)
    layout = layout_of(read_header(model))
    router_map = load(data_path("maps") / "planted-moe.json")
    arms: dict[str, list[list[dict[str, float]]]] = {arm: [] for arm in ARMS}
    prompts = [
        (domain, prompt)
        for domain, found in held_out_prompts().items()
        for prompt in found[: arguments.prompts]
    ]
    for domain, prompt in prompts:
        for arm in ARMS:
            with engine(arguments.engine, model, layout, arguments.budget) as socket:
                arms[arm].append(asyncio.run(measured(socket, prior_of(arm, router_map, domain), prompt)))
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty"],  # noqa: S607
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    result = {
        "model": layout.name,
        "prompts": len(prompts),
        "budget_percent": arguments.budget,
        "kappa": KAPPA,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "commit": said.stdout.strip() or "unknown",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "arms": arms,
    }
    write_text(ROOT / "docs" / "prior.json", json.dumps(result) + "\n")
    write_text(ROOT / "docs" / "prior.md", report(result))
    print(report(result))


if __name__ == "__main__":
    main()
