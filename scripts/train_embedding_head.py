"""Train the embedding classifier's linear head: train_embedding_head.py PROMPTS.jsonl (needs scikit-learn and
sentence-transformers); writes moe_proxy/domains/embedding_head.npz

Fits on short training prompts: the head sees what an embedding says, not where an order stands in a long
text. One temperature is fitted on the calibration split; test is never looked at.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize_scalar
from sklearn.linear_model import LogisticRegression

from moe_proxy.domains.embedding import SHIPPED_MODEL, LinearHead, sentence_encoder

ROOT = Path(__file__).resolve().parent.parent
REGULARISATION = 3.0
PER_DOMAIN_AND_LANGUAGE = 170
STYLES = ("plain", "casual", "written")


def chosen(records: list[dict[str, str]]) -> list[dict[str, str]]:
    """All prompts written as a whole, and as many of the others as say something new."""
    taken: Counter[tuple[str, str]] = Counter()
    kept = []
    for record in records:
        key = record["domain"], record["lang"]
        if record["style"] not in STYLES or (
            record["style"] != "written" and taken[key] >= PER_DOMAIN_AND_LANGUAGE
        ):
            continue
        taken[key] += record["style"] != "written"
        kept.append(record)
    return kept


def fit(records: list[dict[str, str]], vectors: npt.NDArray[np.float32]) -> LinearHead:
    """The head of ``records`` and their vectors (prompts, width); the temperature is folded into it."""
    split = np.array([record["split"] for record in records])
    domains = np.array([record["domain"] for record in records])
    linear = LogisticRegression(C=REGULARISATION, max_iter=1000, class_weight="balanced")
    linear.fit(vectors[split == "train"], domains[split == "train"])
    held = split == "calibration"
    scores = linear.decision_function(vectors[held])
    right = np.searchsorted(linear.classes_, domains[held])

    def loss(log_temperature: float) -> float:
        scaled = scores / np.exp(log_temperature)
        scaled -= scaled.max(axis=1, keepdims=True)
        logs = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
        return float(-logs[np.arange(len(right)), right].mean())

    temperature = float(np.exp(minimize_scalar(loss, bounds=(-3.0, 3.0), method="bounded").x))
    return LinearHead(
        tuple(str(label) for label in linear.classes_),
        (linear.coef_.T / temperature).astype(np.float32),
        (linear.intercept_ / temperature).astype(np.float32),
    )


def main() -> None:
    """Train and save."""
    if len(sys.argv) != 2:
        sys.exit("usage: train_embedding_head.py PROMPTS.jsonl")
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    records = chosen([json.loads(line) for line in lines if line])
    encode = sentence_encoder(SHIPPED_MODEL)
    vectors = encode([record["prompt"] for record in records])
    fit(records, vectors).save(ROOT / "moe_proxy" / "domains" / "embedding_head.npz")


if __name__ == "__main__":
    main()
