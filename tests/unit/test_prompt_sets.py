"""The prompts that classifiers are trained on: how copies are found, how many there are, and their origin."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from moe_proxy.domains.base import DOMAINS

ROOT = Path(__file__).parents[2]


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


CHECK = _script("check_prompts")
OTHERS = [
    "How many days are there in a year that is a leap year?",
    "请用一句话概括这篇文章的主要内容，并说明作者的观点。",
    "Short one",
    "Prove that the limit of a sequence in a metric space is unique if it exists.",
]


@pytest.mark.parametrize(
    ("prompt", "how"),
    [
        ("how many days are there in a year that is a LEAP year", "the same"),
        ("short one!", "the same"),
        ("Thanks! How many days are there in a year that is a leap year? One more thing", "one in the other"),
        ("请用一句话概括这篇文章的主要内容，并说明作者的看法", "nearly the same"),
        ("Prove that the limit of a sequence in a metric space is one only.", "nearly the same"),
    ],
)  # fmt: skip
def test_duplicates_are_found(prompt: str, how: str) -> None:
    """A prompt that also stands in a set that judges is found: normalised, inside another, or nearly so."""
    assert [found[2] for found in CHECK.duplicates([prompt], OTHERS)] == [how]


@pytest.mark.parametrize(
    "prompt",
    [
        "How high is a leap in ballet?",
        "another short one",
        "概括这篇文章",
        "Prove that seven is a prime number.",
    ],
)
def test_common_phrases_are_no_duplicates(prompt: str) -> None:
    """Prompts that share a common phrase are different prompts."""
    assert list(CHECK.duplicates([prompt], OTHERS)) == []


def test_several_hundred_prompts_of_each_domain_with_their_origin() -> None:
    """Several hundred per domain, English and Chinese at least, varied in style, with their origin."""
    lines = (ROOT / "data" / "prompts" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    counts = Counter((record["domain"], record["lang"]) for record in records)
    for domain in DOMAINS:
        for language in ("zh",) if domain == "chinese_tech" else ("en", "zh"):
            assert counts[domain, language] >= 300, (domain, language)
    assert {record["style"] for record in records} == {
        "plain", "written", "casual", "chat", "document", "system",
    }  # fmt: skip
    assert all(record["source"] and record["split"] in ("train", "test") for record in records)


def test_the_report_is_of_the_models_that_ship() -> None:
    """docs/classifier.md is generated from the rules, models and thresholds of the package."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        evaluate = _script("evaluate_classifier")
        content = evaluate.content_hash(evaluate.MODELS)
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    assert content in (ROOT / "docs" / "classifier.md").read_text(encoding="utf-8")
