"""Owns docs/demo-model.md: figures, tables and pictures from the result files. It measures nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

BETTER = {"code": 10, "math": 10, "chinese": 10}
"""Percent by which perplexity must be lower; elsewhere it must be lower at all."""
DIVERGENCE_RATIO = 5
LEAST_SHARE = 0.002
_KINDS = ("top", "lru", "lfu")

HERE = Path(__file__).parent


def _load(results: Path, name: str) -> dict[str, Any]:
    return json.loads((results / name).read_text(encoding="utf-8"))


def loss_picture(log: list[dict[str, float]], target: Path) -> None:
    """Training loss over tokens, with a running mean."""
    tokens = np.array([row["tokens"] for row in log]) / 1e6
    loss = np.array([row["loss"] for row in log])
    width = 9
    mean = np.convolve(loss, np.ones(width) / width, "valid")
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    axes.plot(tokens, loss, color="0.75", linewidth=0.8, label="one batch in ten")
    axes.plot(tokens[width // 2 : -(width // 2)], mean, color="C0", label=f"mean of {width}")
    axes.set(xlabel="million tokens", ylabel="cross entropy, nats per token", title="Training loss")
    axes.legend(frameon=False)
    figure.savefig(target, dpi=100)
    plt.close(figure)


def routing_picture(counts: dict[str, list[list[int]]], layers: list[int], target: Path) -> None:
    """Share of picks by expert (across) and layer (down), one panel for each domain."""
    figure, panels = plt.subplots(2, 3, figsize=(11, 6), layout="constrained", sharex=True, sharey=True)
    for panel, (domain, table) in zip(panels.flat, counts.items(), strict=True):
        share = np.array(table) / np.sum(table, axis=1, keepdims=True) * 100
        image = panel.imshow(share, cmap="magma", vmin=0, vmax=12, aspect="auto", interpolation="nearest")
        panel.set_title(domain)
        panel.set_yticks(range(0, len(layers), 4), [layers[i] for i in range(0, len(layers), 4)])
    figure.supxlabel("expert")
    figure.supylabel("layer")
    figure.colorbar(image, ax=panels, label="% of the layer's picks (even: 3.1)", shrink=0.8)
    figure.savefig(target, dpi=80)
    plt.close(figure)


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
                percent > BETTER.get(domain, 0),
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


def _verdict(met: bool) -> str:
    return "met" if met else "**missed**"


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())


def write_report(results: Path, docs: Path) -> list[str]:
    """Write the page and its pictures under ``docs``; the rows whose bar is missed."""
    measured, engine = _load(results, "measured.json"), _load(results, "engine.json")
    log = [json.loads(line) for line in (results / "train-log.jsonl").read_text().splitlines()]
    pictures = docs / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    loss_picture(log, pictures / "demo-loss.png")
    routing_picture(measured["counts"], measured["layers"], pictures / "demo-routing.png")
    weights = sum(path.stat().st_size for path in (docs.parent / "weights").glob("*.gguf"))
    experts = measured["experts"]
    layers, width = len(measured["layers"]), 576
    trained = layers * experts["count"] * width * (3 * experts["width"] + 1) / 1e6
    bars = _bars(measured, engine)
    page = [
        (HERE / "head.md")
        .read_text(encoding="utf-8")
        .format(experts=experts["count"], layers=layers, used=experts["used"]),
        "## Judged by\n",
        "| what | bar | figure | |\n|---|---|---|---|",
        *(
            f"| {what} | {bar} | {figure} | {'met' if met else '**missed**'} |"
            for what, bar, figure, met in bars
        ),
        "",
        "Perplexity and routing are from the training code in single precision, on the shipped weights and"
        " text that was never trained on; the dense twin is the wheel's own model, measured alike. Windows of"
        " 1,024 tokens that do not overlap.",
        "",
        "![Routing by domain](pictures/demo-routing.png)",
        "",
        "![Training loss](pictures/demo-loss.png)",
        "",
        *_coverage(measured),
        "## It reads",
        "",
        "Ten fixed questions, answered by llama-server on the shipped model at temperature 0 (at most 90"
        " tokens), with the dense twin's answer below each.",
        "",
    ]
    for ours, theirs in zip(engine["answers"], engine["twin"], strict=True):
        page += [f"**{ours['question']}**", "", _quoted(ours["answer"]), "", "Dense twin:", ""]
        page += [_quoted(theirs["answer"]), ""]
    page.append(
        (HERE / "card.md")
        .read_text(encoding="utf-8")
        .format(
            trained=trained,
            size=weights / 1e6,
            tokens=log[-1]["tokens"] / 1e6,
            minutes=log[-1]["seconds"] / 60,
            asks="1,530",
        )
        .rstrip()
    )
    (docs / "demo-model.md").write_text("\n".join(page) + "\n", encoding="utf-8")
    return [f"{what}: {figure} ({bar})" for what, bar, figure, met in bars if not met]
