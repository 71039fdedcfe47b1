"""Train the embedding classifier's linear head: train_embedding_head.py PROMPTS.jsonl (needs scikit-learn and
sentence-transformers); writes moe_proxy/domains/embedding_head.npz

Fits on short prompts: the head sees what an embedding says, not where an order stands in a long text. Its
temperature is fitted like that of the tfidf classifier, on sources that were held out; test is never looked
at.
"""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from sklearn.linear_model import LogisticRegression
from train_tfidf import GENERATED, Record, Scores, fold_of, sample_weights, temperature_of

from moe_proxy.domains.embedding import SHIPPED_MODEL, LinearHead, sentence_encoder

ROOT = Path(__file__).resolve().parent.parent
REGULARISATION = 3.0
PER_DOMAIN_AND_LANGUAGE = 60
STYLES = ("plain", "casual", "written")

Vectors = npt.NDArray[np.float32]


def chosen(records: Sequence[Record]) -> list[Record]:
    """Of what is not for testing, all prompts written as a whole and as many others as say something new."""
    taken: Counter[tuple[str, str]] = Counter()
    kept = []
    for record in records:
        key = record["domain"], record["lang"]
        if record["split"] == "test" or record["style"] not in STYLES:
            continue
        if record["style"] != "written":
            if record["source"] != GENERATED or taken[key] >= PER_DOMAIN_AND_LANGUAGE:
                continue
            taken[key] += 1
        kept.append(record)
    return kept


def fit(records: Sequence[Record], vectors: Vectors) -> LogisticRegression:
    """The head of ``records`` and their vectors (prompts, width)."""
    linear = LogisticRegression(C=REGULARISATION, max_iter=1000)
    linear.fit(vectors, [r["domain"] for r in records], sample_weight=sample_weights(records))
    return linear


def out_of_source(records: Sequence[Record], vectors: Vectors) -> tuple[npt.NDArray[np.intp], Scores]:
    """Indices of the prompts that were held out once, and their scores by a head without their source."""
    folds = np.array([fold_of(record) for record in records])
    indices, found = [], []
    for fold in sorted(set(folds) - {GENERATED}):
        kept, held = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        head = fit([records[i] for i in kept], vectors[kept])
        indices.append(held)
        found.append(head.decision_function(vectors[held]))
    return np.concatenate(indices), np.concatenate(found)


def train(records: Sequence[Record], vectors: Vectors) -> LinearHead:
    """The head; the temperature is folded into it."""
    linear = fit(records, vectors)
    labels = tuple(str(label) for label in linear.classes_)
    held, scores = out_of_source(records, vectors)
    temperature = temperature_of(scores, np.array([labels.index(records[i]["domain"]) for i in held]))
    return LinearHead(
        labels,
        (linear.coef_.T / temperature).astype(np.float32),
        (linear.intercept_ / temperature).astype(np.float32),
    )


def main() -> None:
    """Train and save."""
    if len(sys.argv) != 2:
        sys.exit("usage: train_embedding_head.py PROMPTS.jsonl")
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    records = chosen([json.loads(line) for line in lines if line])
    vectors = sentence_encoder(SHIPPED_MODEL)([record["prompt"] for record in records])
    train(records, vectors).save(ROOT / "moe_proxy" / "domains" / "embedding_head.npz")


if __name__ == "__main__":
    main()
