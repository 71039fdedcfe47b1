"""Calibrate the cascade: calibrate_cascade.py [PROMPTS.jsonl] (needs scikit-learn and sentence-transformers);
writes moe_proxy/domains/thresholds.json

All figures are of prompts whose source the asked models had not seen: a source is left out, the model is
fitted on the others, and the left-out prompts are answered.

For each classifier, the lowest confidence from which it is right in ALONE of them: from there on nobody else
is asked. For each set of classifiers that may have answered, the weights of their logarithms that make the
pooled answer likeliest to be right. For the pooled answer of the default cascade, the lowest confidence from
which what is accepted is right in ACCEPTED of them.
"""

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize
from train_embedding_head import chosen
from train_embedding_head import out_of_source as head_out_of_source
from train_tfidf import Record, Scores, log_softmax, matrix, out_of_source, temperature_of

from moe_proxy.config import DEFAULT_CLASSIFIERS
from moe_proxy.domains.base import DOMAINS
from moe_proxy.domains.cascade import LEAST
from moe_proxy.domains.embedding import SHIPPED_MODEL, is_latin, sentence_encoder
from moe_proxy.domains.keywords import KeywordClassifier

ROOT = Path(__file__).resolve().parent.parent
ALONE = 0.98
ACCEPTED = 0.93
ENOUGH = 20  # a handful of sure answers that happen to be right are no evidence
UNCALIBRATED = {"embedding": 1.0}  # an extra, of the operator's choice: heard with the others, never alone

Right = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]


def threshold(logs: Scores, right: Right, answered: Mask, precision: float) -> float:
    """The lowest confidence from which the answers are right in ``precision`` of the cases; 1: none is."""
    confidence = np.exp(logs[answered].max(axis=1))
    hits = logs[answered].argmax(axis=1) == right[answered]
    order = np.argsort(-confidence, kind="stable")
    enough = np.flatnonzero(np.cumsum(hits[order]) / np.arange(1, len(order) + 1) >= precision)
    if not len(enough) or enough[-1] < ENOUGH:
        return 1.0
    return round(float(confidence[order][enough[-1]]), 3)


def weights_of(logs: list[Scores], right: Right) -> npt.NDArray[np.float64]:
    """The weights, none negative, that make the right labels likeliest."""

    def loss(weights: npt.NDArray[np.float64]) -> float:
        mixed = log_softmax(sum(w * log for w, log in zip(weights, logs, strict=True)))
        return float(-mixed[np.arange(len(right)), right].mean())

    found = minimize(loss, np.full(len(logs), 0.5), bounds=[(0.0, None)] * len(logs))
    weights: npt.NDArray[np.float64] = np.round(found.x, 3)
    return weights


@dataclass(frozen=True)
class Answers:
    """Log-probabilities (prompts, domains) by classifier, and which prompts it answers; the right domains."""

    logs: Mapping[str, Scores]
    answered: Mapping[str, Mask]
    right: Right


def answers_of(records: list[Record]) -> Answers:
    """What each classifier says of the prompts whose source it has not seen."""
    held = [record for record in records if record["split"] != "test"]
    short = chosen(records)
    labels = tuple(sorted(DOMAINS))
    rows, scores = out_of_source(matrix([r["prompt"] for r in held]), held, labels)
    vectors = sentence_encoder(SHIPPED_MODEL)([record["prompt"] for record in short])
    head_rows, head_scores = head_out_of_source(short, vectors)
    tfidf = {held[i]["prompt"]: score for i, score in zip(rows, scores, strict=True)}
    head = {short[i]["prompt"]: score for i, score in zip(head_rows, head_scores, strict=True)}
    domain_of = {record["prompt"]: record["domain"] for record in held}
    prompts = [prompt for prompt in head if prompt in tfidf]
    right = np.array([labels.index(domain_of[prompt]) for prompt in prompts])
    keyword = [KeywordClassifier.shipped().classify(prompt).distribution for prompt in prompts]
    logs: dict[str, Scores] = {
        "keyword": np.log([[max(d.get(label, 1.0), LEAST) for label in labels] for d in keyword])
    }
    # As in the models that ship, the temperature is that of all scores.
    for name, found in (("tfidf", tfidf), ("embedding", head)):
        raw = np.array([found[prompt] for prompt in prompts])
        logs[name] = np.maximum(log_softmax(raw / temperature_of(raw, right)), np.log(LEAST))
    answered = {
        "keyword": np.array([bool(d) for d in keyword]),
        "tfidf": np.ones(len(prompts), bool),
        "embedding": np.array([is_latin(prompt) for prompt in prompts]),
    }
    return Answers(logs, answered, right)


def pooled(answers: Answers, weights: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> Scores:
    """What the cascade of ``names`` says after pooling: each prompt with the weights of those that answer."""
    found = np.zeros((len(answers.right), len(DOMAINS)))
    for row in range(len(found)):
        those = weights["+".join(name for name in names if answers.answered[name][row])]
        found[row] = sum(weight * answers.logs[name][row] for name, weight in those.items())
    return log_softmax(found)


def main() -> None:
    """Calibrate and write."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "data" / "prompts" / "prompts.jsonl"
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    answers = answers_of(records)
    thresholds = {
        name: threshold(logs, answers.right, answers.answered[name], ALONE)
        for name, logs in answers.logs.items()
    }
    weights = {}
    for size in range(1, len(answers.logs) + 1):
        for names in itertools.combinations(answers.logs, size):
            rows = np.logical_and.reduce([answers.answered[name] for name in names])
            found = weights_of([answers.logs[name][rows] for name in names], answers.right[rows])
            weights["+".join(names)] = dict(zip(names, found.tolist(), strict=True))
    for names in (("keyword", "tfidf"), ("keyword", "tfidf", "embedding")):
        logs = pooled(answers, weights, names)
        print(names, f"right in {(logs.argmax(axis=1) == answers.right).mean():.3f}")
        if ",".join(names) == DEFAULT_CLASSIFIERS:
            thresholds["pooled"] = threshold(logs, answers.right, np.ones(len(logs), bool), ACCEPTED)
    document = {
        "source": path.name,
        "prompts": len(answers.right),
        "precision_alone": ALONE,
        "precision_pooled": ACCEPTED,
        "thresholds": {**thresholds, **UNCALIBRATED},
        "weights": weights,
    }
    out = ROOT / "moe_proxy" / "domains" / "thresholds.json"
    out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(document)


if __name__ == "__main__":
    main()
