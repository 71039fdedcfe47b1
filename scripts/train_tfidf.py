"""Train the tfidf classifier: train_tfidf.py PROMPTS.jsonl OUT.npz (needs scikit-learn)

Each line of PROMPTS has "prompt" and "domain", and may have "split" (train, calibration or test);
without it a fifth is set aside for calibration. Fits on train, and one temperature on calibration; test
is never looked at.
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize_scalar
from scipy.sparse import csr_matrix
from sklearn.linear_model import LogisticRegression

from moe_proxy.domains.tfidf import COLUMN_BITS, TfidfModel, columns_of

REGULARISATION = 30.0
MIN_WEIGHT = 1e-3


def split_of(record: dict[str, str]) -> str:
    """The split a record names, or one from the hash of its text."""
    digest = hashlib.sha256(record["prompt"].encode()).digest()
    return record.get("split") or ("calibration" if digest[0] < 52 else "train")


def matrix(texts: list[str], idf: npt.NDArray[np.float32] | None = None) -> csr_matrix:
    """Rows of ``1 + log`` counts (texts, columns); with ``idf``, weighted and scaled to length 1."""
    rows = [columns_of(text) for text in texts]
    values = [1 + np.log(counts) for _, counts in rows]
    if idf is not None:
        values = [value * idf[columns] for value, (columns, _) in zip(values, rows, strict=True)]
        values = [value / (np.sqrt(value @ value) or 1.0) for value in values]
    ends = np.cumsum([0, *(len(columns) for columns, _ in rows)])
    indices = np.concatenate([columns for columns, _ in rows])
    return csr_matrix((np.concatenate(values), indices, ends), shape=(len(rows), 2**COLUMN_BITS))


def train(records: list[dict[str, str]], source: str) -> TfidfModel:
    """The model of ``records``; the temperature is folded into its weights."""
    by_split: dict[str, list[dict[str, str]]] = {"train": [], "calibration": [], "test": []}
    for record in records:
        by_split[split_of(record)].append(record)
    texts = [record["prompt"] for record in by_split["train"]]
    document_frequency = np.bincount(
        np.concatenate([columns_of(text)[0] for text in texts]), minlength=2**COLUMN_BITS
    )
    # A column seen once says more about the text than about its domain; one never seen says nothing.
    idf = np.where(document_frequency > 1, np.log((1 + len(texts)) / (1 + document_frequency)) + 1, 0).astype(
        np.float32
    )
    idf = idf.astype(np.float16).astype(np.float32)
    linear = LogisticRegression(C=REGULARISATION, max_iter=400, class_weight="balanced")
    linear.fit(matrix(texts, idf), [record["domain"] for record in by_split["train"]])
    labels = tuple(str(label) for label in linear.classes_)

    held = by_split["calibration"]
    scores = linear.decision_function(matrix([record["prompt"] for record in held], idf))
    right = np.array([labels.index(record["domain"]) for record in held])

    def loss(log_temperature: float) -> float:
        scaled = scores / np.exp(log_temperature)
        scaled -= scaled.max(axis=1, keepdims=True)
        logs = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
        return float(-logs[np.arange(len(right)), right].mean())

    temperature = float(np.exp(minimize_scalar(loss, bounds=(-3.0, 3.0), method="bounded").x))
    weights = linear.coef_.T / temperature
    weights[np.abs(weights) < MIN_WEIGHT] = 0
    return TfidfModel(
        labels,
        idf.astype(np.float16),
        weights.astype(np.float16),
        (linear.intercept_ / temperature).astype(np.float32),
        {
            "source": source,
            "prompts": len(texts),
            "calibrated_on": len(held),
            "temperature": round(temperature, 3),
        },
    )


def main() -> None:
    """Train and save."""
    if len(sys.argv) != 3:
        sys.exit("usage: train_tfidf.py PROMPTS.jsonl OUT.npz")
    source, out = Path(sys.argv[1]), Path(sys.argv[2])
    lines = source.read_text(encoding="utf-8").splitlines()
    model = train([json.loads(line) for line in lines if line], source.name)
    model.save(out)
    print(f"{out}: {dict(model.made)}, {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
