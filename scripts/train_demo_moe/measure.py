"""Owns what is measured with the training code: perplexity, routing, greedy text; one JSON, one trace.

It reads the shipped weights, not a checkpoint, and only held-out text.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from corpus import DOMAINS, END_OF_TEXT, SYSTEM
from dense import load_tokenizer, read_dense
from export import restore, shape_of
from model import Upcycled
from routing import counts_of, coverage, divergence

PROMPTS = (
    "What is photosynthesis?",
    "Write a Python function that returns the larger of two numbers.",
    "Explain what a database index is.",
    "Why do leaves change colour in autumn?",
    "Tell me a short story about a fox and a crow.",
)
GREEDY_TOKENS = 32
TRACE_TOKENS = 1024
_LENGTH = 1024
_BATCH = 16


def ask(question: str) -> str:
    """A question in the model's chat template, ready for the answer."""
    return (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@torch.no_grad()
def read_held_out(model: Upcycled, tokens: np.ndarray, routed: bool) -> tuple[float, np.ndarray]:
    """Mean loss per token, and the picks (tokens, layers, used) in order. Windows do not overlap."""
    rows = tokens[: len(tokens) // _LENGTH * _LENGTH].reshape(-1, _LENGTH).astype(np.int64)
    losses, picks = [], []
    for start in range(0, len(rows), _BATCH):
        batch = torch.from_numpy(rows[start : start + _BATCH]).to(model.embedding.device)
        hidden, picked, _ = model.hidden(batch, routed)
        losses.append(model.losses(hidden[:, :-1], batch[:, 1:]).double().cpu())
        if routed:
            picks.append(torch.stack(picked, 2).flatten(0, 1).to(torch.uint8).cpu().numpy())
    return float(torch.cat(losses).mean()), np.concatenate(picks) if picks else np.zeros(0)


def main() -> None:
    """Measure the shipped weights and write ``measured.json`` and ``routing-trace.npz``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dense", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True, help="folder of the shipped parts")
    parser.add_argument("--data", type=Path, required=True, help="folder of *.held.npy")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dense = read_dense(arguments.dense)
    # Greedy text is compared with llama.cpp on half-precision weights: the same ones here.
    dense.tensors.update(
        {n: t if n.endswith("norm.weight") else t.astype(np.float16).astype(np.float32)
         for n, t in dense.tensors.items()}
    )  # fmt: skip
    model = Upcycled(dense, shape_of(arguments.weights), device, torch.float32)
    restore(model, arguments.weights)
    experts = model.experts.count
    tokenizer = load_tokenizer(arguments.tokenizer)

    greedy = []
    for prompt in PROMPTS:
        answer = model.greedy(tokenizer.encode(ask(prompt)).ids, GREEDY_TOKENS)
        text = tokenizer.decode(answer, skip_special_tokens=False)
        greedy.append({"prompt": prompt, "tokens": answer, "text": text})
        print(json.dumps(greedy[-1]), flush=True)

    torch.set_float32_matmul_precision("high")
    result: dict[str, object] = {
        "greedy": greedy,
        "experts": model.experts.record(),
        "layers": list(model.layers),
    }
    perplexity, halves, cover, trace, counts = {}, {}, {}, {}, {}
    for domain in DOMAINS:
        tokens = np.load(arguments.data / f"{domain}.held.npy")
        dense_loss, _ = read_held_out(model, tokens, routed=False)
        moe_loss, picks = read_held_out(model, tokens, routed=True)
        perplexity[domain] = {"tokens": len(picks), "dense": np.exp(dense_loss), "moe": np.exp(moe_loss)}
        # Every other document: halves of the same sources.
        half = np.cumsum(tokens[: len(picks)] == END_OF_TEXT) % 2
        halves[domain] = [counts_of(picks[half == side], experts) for side in (0, 1)]
        counts[domain] = sum(halves[domain])
        cover[domain] = coverage(picks, half, experts)
        trace[domain] = picks[:TRACE_TOKENS]
        print(domain, perplexity[domain], flush=True)
    pairs = [divergence(counts[a], counts[b]) for i, a in enumerate(DOMAINS) for b in DOMAINS[i + 1 :]]
    within = [divergence(*halves[domain]) for domain in DOMAINS]
    # Every domain weighs the same, however long its held-out text is.
    share = sum(c / c.sum(1, keepdims=True) for c in counts.values()) / len(counts)
    pooled = sum(counts.values())
    pooled = pooled / pooled.sum(1, keepdims=True)
    result |= {
        "perplexity": perplexity,
        "divergence": {
            "between": float(np.mean(pairs)), "within": float(np.mean(within)),
            "pairs": pairs, "halves": within,
        },
        "least_share": {"domains_equal": float(share.min()), "pooled": float(pooled.min())},
        "largest_share": {"domains_equal": float(share.max()), "pooled": float(pooled.max())},
        "coverage": cover,
        "counts": {domain: table.tolist() for domain, table in counts.items()},
    }  # fmt: skip
    (arguments.output / "measured.json").write_text(json.dumps(result), encoding="utf-8")
    np.savez_compressed(arguments.output / "routing-trace.npz", **trace)
    print(
        json.dumps({key: result[key] for key in ("divergence", "least_share", "largest_share")}), flush=True
    )


if __name__ == "__main__":
    main()
