"""Judge the classifiers and write docs/classifier.md: evaluate_classifier.py [FILE.jsonl …]
[--classifier NAMES]

The held-out split of data/prompts is always judged; each FILE (lines with "prompt", "domain" and "lang")
is another set. No classifier is trained or calibrated on a set that is judged here. Choices were made after a
look at totals on such sets, so the figures may flatter.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from provenance import content_hash
from provenance import judged as judged_content

from moe_proxy.config import DEFAULT_CLASSIFIERS
from moe_proxy.domains.base import DOMAINS, Classification, Classifier
from moe_proxy.domains.choice import build_classifier, parse_names
from moe_proxy.domains.keywords import KeywordClassifier
from moe_proxy.domains.tfidf import TfidfClassifier
from moe_proxy.files import write_text

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "classifier.md"
BINS = 10
LENGTHS = (200, 2_000, 200_000)
REPEATS = 3
MODELS = tuple(
    ROOT / "moe_proxy" / "domains" / name
    for name in ("keywords.json", "tfidf.npz", "embedding_head.npz", "thresholds.json")
)
PROMPTS = ROOT / "data" / "prompts" / "prompts.jsonl"


@dataclass(frozen=True)
class Prompt:
    """One labelled prompt."""

    text: str
    domain: str
    language: str


def read(path: Path, split: str | None = None) -> list[Prompt]:
    """Prompts of a file, of one split if told."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        Prompt(record["prompt"], record["domain"], record.get("lang", "?"))
        for record in records
        if split is None or record.get("split") == split
    ]


def calibration_error(prompts: Sequence[Prompt], answers: Sequence[Classification]) -> float:
    """Expected calibration error over the answers that are no abstentions, in ten bins of equal width."""
    sure = np.array([answer.confidence for answer in answers if answer.distribution])
    right = np.array(
        [
            answer.domain == prompt.domain
            for prompt, answer in zip(prompts, answers, strict=True)
            if answer.distribution
        ]
    )
    bins = np.minimum((sure * BINS).astype(int), BINS - 1)
    gaps = [
        (bins == number).sum() * abs(right[bins == number].mean() - sure[bins == number].mean())
        for number in np.unique(bins)
    ]
    return float(sum(gaps) / len(sure)) if len(sure) else 0.0


def row(cells: Sequence[object]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def accuracy_table(prompts: Sequence[Prompt], answers: Sequence[Classification]) -> list[str]:
    """Accuracy by domain and language; abstentions counted apart."""
    asked: Counter[tuple[str, str]] = Counter()
    right: Counter[tuple[str, str]] = Counter()
    silent: Counter[tuple[str, str]] = Counter()
    for prompt, answer in zip(prompts, answers, strict=True):
        for key in (
            (prompt.domain, prompt.language),
            (prompt.domain, "all"),
            ("all", prompt.language),
            ("all", "all"),
        ):
            asked[key] += 1
            silent[key] += answer.domain is None
            right[key] += answer.domain == prompt.domain
    lines = [
        row(("domain", "language", "prompts", "abstained", "right of the decided", "right of all")),
        "|---" * 6 + "|",
    ]
    for key in sorted(asked, key=lambda key: (key[0] == "all", key[0], key[1] == "all", key[1])):
        decided = asked[key] - silent[key]
        share = f"{right[key] / decided:.3f}" if decided else "–"
        lines.append(row((*key, asked[key], silent[key], share, f"{right[key] / asked[key]:.3f}")))
    return lines


def confusion_table(prompts: Sequence[Prompt], answers: Sequence[Classification]) -> list[str]:
    """Rows: the label; columns: the answer."""
    pairs = Counter((prompt.domain, answer.domain) for prompt, answer in zip(prompts, answers, strict=True))
    lines = [row(("", *DOMAINS, "abstained")), "|---" * (len(DOMAINS) + 2) + "|"]
    for domain in DOMAINS:
        if any(label == domain for label, _ in pairs):
            lines.append(row((domain, *(pairs[domain, answer] or "" for answer in (*DOMAINS, None)))))
    return lines


def time_table(classifiers: Sequence[tuple[str, Classifier]], texts: Sequence[str]) -> list[str]:
    """Processor time per prompt in milliseconds, on texts cut or repeated to a length.

    The least of a few tries: other programs share the caches of the processor.
    """
    lines = [row(("classifier", "characters", "median ms", "p99 ms")), "|---" * 4 + "|"]
    for name, classifier in classifiers:
        for length in LENGTHS:
            times = []
            for number in range(20 if classifier.slow else 200):
                text = texts[number % len(texts)]
                text = (text * (length // len(text) + 1))[:length]
                tries = []
                for _ in range(REPEATS):
                    start = time.thread_time()
                    classifier.classify(text)
                    tries.append(1000 * (time.thread_time() - start))
                times.append(min(tries))
            lines.append(
                row((name, length, f"{statistics.median(times):.2f}", f"{np.quantile(times, 0.99):.2f}"))
            )
    return lines


def main() -> None:
    """Judge and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument(
        "--classifier", action="append", default=[], help="a cascade to judge besides the default"
    )
    arguments = parser.parse_args()
    names = parse_names(DEFAULT_CLASSIFIERS)
    both = build_classifier(names, thresholds={"keyword": 1.0, "tfidf": 1.0, "pooled": 0.0})
    judged: list[tuple[str, Classifier]] = [
        ("keyword", KeywordClassifier.shipped()),
        ("tfidf", TfidfClassifier.shipped()),
        ("keyword and tfidf pooled, never abstaining", both),
        (f"cascade {DEFAULT_CLASSIFIERS} (the default)", build_classifier(names)),
    ]
    judged += [(f"cascade {names}", build_classifier(parse_names(names))) for names in arguments.classifier]
    sets = {"held-out split of data/prompts": read(PROMPTS, "test")}
    sets |= {path.name: read(path) for path in arguments.files}

    lines = [
        "# The classifiers, judged",
        "",
        f"Generated by `scripts/evaluate_classifier.py` of {judged_content(*MODELS)} (rules, models and"
        f" thresholds), on prompts of content {content_hash((PROMPTS, *arguments.files))};"
        f" {platform.machine()}, Python {platform.python_version()}.",
        "",
        "No set judged here was trained on, and no training prompt stands in one, nor nearly so:"
        " `scripts/check_prompts.py` looks for them. Kinds of training prompts, the vocabulary of the rules"
        " and the precision asked of pooled answers were chosen after a look at totals by domain, language,"
        " source and length on these sets, never at a prompt of another's, so none is untouched."
        " Temperatures, weights and thresholds are fitted on own prompts whose source the model had not seen"
        " (`scripts/calibrate_cascade.py`). An abstention is counted apart: the request then counts as the"
        " average of all domains. ECE is the expected calibration error.",
        "",
        "## Summary",
        "",
        row(("set", "classifier", "prompts", "abstained", "right of the decided", "right of all", "ECE")),
        "|---" * 7 + "|",
    ]
    details: list[str] = []
    for set_name, prompts in sets.items():
        for name, classifier in judged:
            answers = [classifier.classify(prompt.text) for prompt in prompts]
            right = sum(a.domain == p.domain for p, a in zip(prompts, answers, strict=True))
            decided = sum(a.domain is not None for a in answers)
            lines.append(
                row(
                    (
                        set_name,
                        name,
                        len(prompts),
                        len(prompts) - decided,
                        f"{right / max(decided, 1):.3f}",
                        f"{right / len(prompts):.3f}",
                        f"{calibration_error(prompts, answers):.3f}",
                    )
                )
            )
            if "cascade" in name:
                details += ["", f"## {set_name}: {name}", "", *accuracy_table(prompts, answers)]
                details += ["", "Rows are labels, columns answers.", "", *confusion_table(prompts, answers)]
    texts = [prompt.text for prompt in next(iter(sets.values()))]
    lines += [*details, "", "## Time", "", *time_table([judged[2], *judged[3:]], texts)]
    write_text(OUT, "\n".join(lines) + "\n")
    start = lines.index("## Summary") + 2
    print("\n".join(lines[start : start + 2 + len(sets) * len(judged)]))


if __name__ == "__main__":
    sys.exit(main())
