"""Train the tfidf classifier: train_tfidf.py PROMPTS.jsonl OUT.npz (needs scikit-learn)

Each line of PROMPTS has "prompt" and "domain"; it may have "split" (test is never looked at) and "source",
which says where the prompt is from. A linear support vector machine is fitted; what turns its scores into
probabilities is one temperature, fitted on scores of models that saw no prompt of the same source: prompts of
other people are to be judged, not more of these.
"""

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize_scalar
from scipy.sparse import csr_matrix
from sklearn.svm import LinearSVC

from moe_proxy.domains.tfidf import COLUMN_BITS, TfidfModel, columns_of

REGULARISATION = 1.0
GENERATED = "blocks"
"""Source of the prompts made of building blocks: many and alike, so each counts less, and never held out."""
GENERATED_WEIGHT = 0.5
FOLDS = 5
MIN_WEIGHT = 1e-3

Record = dict[str, str]
Scores = npt.NDArray[np.float64]


def fold_of(record: Record) -> str:
    """The prompts that are held out together: a source, or a share by hash where none is named."""
    digest = hashlib.sha256(record["prompt"].encode()).digest()
    return record.get("source") or str(digest[0] % FOLDS)


def matrix(texts: Sequence[str]) -> csr_matrix:
    """Rows of ``1 + log`` counts (texts, columns)."""
    rows = [columns_of(text) for text in texts]
    ends = np.cumsum([0, *(len(columns) for columns, _ in rows)])
    values = np.concatenate([1 + np.log(counts) for _, counts in rows])
    indices = np.concatenate([columns for columns, _ in rows])
    return csr_matrix((values, indices, ends), shape=(len(rows), 2**COLUMN_BITS))


def weighted(rows: csr_matrix, idf: npt.NDArray[np.float32]) -> csr_matrix:
    """Rows times ``idf``, scaled to length 1."""
    scaled = csr_matrix(rows.multiply(idf))
    lengths = np.sqrt(np.asarray(scaled.multiply(scaled).sum(axis=1)))
    lengths[lengths == 0] = 1
    return csr_matrix(scaled.multiply(1 / lengths))


def sample_weights(records: Sequence[Record]) -> npt.NDArray[np.float64]:
    """What each prompt counts: every domain the same in all."""
    weights = np.array([GENERATED_WEIGHT if r.get("source") == GENERATED else 1.0 for r in records])
    labels, index = np.unique([record["domain"] for record in records], return_inverse=True)
    totals = np.bincount(index, weights=weights)
    balanced: npt.NDArray[np.float64] = weights * (weights.sum() / len(labels) / totals)[index]
    return balanced


def fit(
    rows: csr_matrix, records: Sequence[Record]
) -> tuple[npt.NDArray[np.float32], tuple[str, ...], Scores, Scores]:
    """Inverse document frequencies, labels, weights (columns, labels) and biases of a model."""
    frequency = np.bincount(rows.indices, minlength=rows.shape[1])
    # A column seen once says more about the text than about its domain; one never seen says nothing.
    idf = np.where(frequency > 1, np.log((1 + len(records)) / (1 + frequency)) + 1, 0)
    idf = idf.astype(np.float16).astype(np.float32)
    known = np.flatnonzero(idf)
    linear = LinearSVC(C=REGULARISATION, max_iter=5000)
    domains = [record["domain"] for record in records]
    linear.fit(weighted(rows, idf)[:, known], domains, sample_weight=sample_weights(records))
    labels = tuple(str(label) for label in linear.classes_)
    coefficients, bias = linear.coef_, linear.intercept_
    if len(labels) == 2:  # one column tells two labels apart
        coefficients, bias = np.vstack([-coefficients, coefficients]), np.array([-bias[0], bias[0]])
    weights = np.zeros((rows.shape[1], len(labels)))
    weights[known] = coefficients.T
    return idf, labels, weights, bias


def log_softmax(scores: Scores) -> Scores:
    """Logarithms of the probabilities of each row."""
    shifted = scores - scores.max(axis=1, keepdims=True)
    logs: Scores = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return logs


def temperature_of(scores: Scores, right: npt.NDArray[np.intp]) -> float:
    """What the scores (prompts, labels) must be divided by to be log-odds of the labels ``right``."""

    def loss(log_temperature: float) -> float:
        logs = log_softmax(scores / np.exp(log_temperature))
        return float(-logs[np.arange(len(right)), right].mean())

    return float(np.exp(minimize_scalar(loss, bounds=(-4.0, 4.0), method="bounded").x))


def out_of_source(
    rows: csr_matrix, records: Sequence[Record], labels: tuple[str, ...]
) -> tuple[npt.NDArray[np.intp], Scores]:
    """Indices of the prompts that were held out once, and their scores by a model without their source."""
    folds = np.array([fold_of(record) for record in records])
    indices: list[npt.NDArray[np.intp]] = []
    found: list[Scores] = []
    for fold in sorted(set(folds) - {GENERATED}):
        kept, held = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        if {records[i]["domain"] for i in kept} != set(labels):
            continue  # a source that alone holds a domain cannot be left out
        idf, _, weights, bias = fit(rows[kept], [records[i] for i in kept])
        indices.append(held)
        found.append(np.asarray(weighted(rows[held], idf) @ weights + bias))
    if not indices:
        sys.exit("no prompts can be held out: each source holds a domain that no other has")
    return np.concatenate(indices), np.concatenate(found)


def train(records: list[Record], source: str) -> TfidfModel:
    """The model of ``records``; the temperature is folded into its weights."""
    records = [record for record in records if record.get("split") != "test"]
    rows = matrix([record["prompt"] for record in records])
    idf, labels, weights, bias = fit(rows, records)
    held, scores = out_of_source(rows, records, labels)
    temperature = temperature_of(scores, np.array([labels.index(records[i]["domain"]) for i in held]))
    weights = weights / temperature
    weights[np.abs(weights) < MIN_WEIGHT] = 0
    about = {
        "source": source,
        "prompts": len(records),
        "calibrated_on": len(held),
        "temperature": round(temperature, 3),
    }
    return TfidfModel(
        labels,
        idf.astype(np.float16),
        weights.astype(np.float16),
        (bias / temperature).astype(np.float32),
        about,
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
