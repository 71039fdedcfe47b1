"""Calibrate the cascade's thresholds: calibrate_cascade.py [PROMPTS.jsonl]; writes
moe_proxy/domains/thresholds.json

For each classifier, the lowest confidence from which it is right in ALONE of the calibration prompts:
from there on nobody else is asked. For the pooled answer, the lowest from which what is accepted is
right in ACCEPTED of them.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moe_proxy.domains.base import Classification
from moe_proxy.domains.cascade import pool
from moe_proxy.domains.keywords import KeywordClassifier
from moe_proxy.domains.tfidf import TfidfClassifier

ROOT = Path(__file__).resolve().parent.parent
ALONE = 0.995
ACCEPTED = 0.965  # other people's prompts come out some ten points worse than those of our own hand
LEAST = 0.35  # below this the likeliest of eight domains is a guess, however the prompts come out
UNCALIBRATED = {"embedding": 1.0}  # an extra, of the operator's choice: heard with the others, never alone


def threshold(answers: Sequence[Classification], domains: Sequence[str], precision: float) -> float:
    """The lowest confidence from which the answers are right in ``precision`` of the cases; 1 if there
    is none.
    """
    sure = sorted(
        (
            (answer.confidence, answer.domain == domain)
            for answer, domain in zip(answers, domains, strict=True)
            if answer.distribution
        ),
        reverse=True,
    )
    right = np.cumsum([hit for _, hit in sure]) / np.arange(1, len(sure) + 1)
    enough = np.flatnonzero(right >= precision)
    # A handful of sure answers that happen to be right are no evidence.
    return round(float(sure[enough[-1]][0]), 3) if len(enough) and enough[-1] >= 20 else 1.0


def main() -> None:
    """Calibrate on the calibration split and write the thresholds."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "data" / "prompts" / "prompts.jsonl"
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    held = [record for record in records if record["split"] == "calibration"]
    domains = [record["domain"] for record in held]
    classifiers = (KeywordClassifier.shipped(), TfidfClassifier.shipped())
    answers = {c.name: [c.classify(record["prompt"]) for record in held] for c in classifiers}
    thresholds = {name: threshold(given, domains, ALONE) for name, given in answers.items()}
    pooled = [
        Classification(pool([a.distribution for a in given if a.distribution]), "pooled")
        for given in zip(*answers.values(), strict=True)
        if any(a.distribution for a in given)
    ]
    thresholds["pooled"] = max(threshold(pooled, domains, ACCEPTED), LEAST)
    document = {
        "source": path.name,
        "prompts": len(held),
        "precision_alone": ALONE,
        "precision_pooled": ACCEPTED,
        "thresholds": {**thresholds, **UNCALIBRATED},
    }
    out = ROOT / "moe_proxy" / "domains" / "thresholds.json"
    out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(document)


if __name__ == "__main__":
    main()
