"""Owns which classifiers a run asks, and from which confidence on each is believed.

The thresholds and weights that ship are calibrated on held-out prompts by ``scripts/calibrate_cascade.py``;
it calibrates nothing itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from moe_proxy.config import DEFAULT_CLASSIFIERS, Settings
from moe_proxy.domains.base import Classifier
from moe_proxy.domains.cascade import Cascade
from moe_proxy.domains.embedding import SHIPPED_MODEL, EmbeddingClassifier
from moe_proxy.domains.keywords import KeywordClassifier
from moe_proxy.domains.tfidf import TfidfClassifier, load_model
from moe_proxy.errors import ConfigError

NAMES = ("keyword", "tfidf", "embedding")
POOLED = "pooled"
"""Key of the threshold of the pooled answer."""


@cache
def _shipped() -> Mapping[str, Any]:
    path = Path(__file__).with_name("thresholds.json")
    document: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def shipped_thresholds() -> Mapping[str, float]:
    """Calibrated confidence by classifier, and that of the pooled answer."""
    thresholds: Mapping[str, float] = _shipped()["thresholds"]
    return thresholds


def shipped_weights(names: Sequence[str]) -> Mapping[str, Mapping[str, float]]:
    """Calibrated weights by the classifiers that answered, joined in the order of ``names``."""
    weights: Mapping[str, Mapping[str, float]] = _shipped()["weights"]
    return {
        "+".join(sorted(those, key=names.index)): those
        for those in weights.values()
        if set(those) <= set(names)
    }


def parse_names(text: str) -> tuple[str, ...]:
    """Classifiers of ``text``, separated by commas. Raises ConfigError for one that does not exist."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in NAMES:
            raise ConfigError(
                f"there is no classifier {name!r}", f"choose from {', '.join(NAMES)}, separated by commas"
            )
    if len(set(names)) != len(names):
        raise ConfigError(f"{text!r} names a classifier twice", f"the default is {DEFAULT_CLASSIFIERS}")
    return names


def build_classifier(
    names: Sequence[str],
    *,
    thresholds: Mapping[str, float] | None = None,
    tfidf_model: Path | None = None,
    embedding_model: str | None = None,
) -> Classifier:
    """The cascade of ``names``, in their order.

    ``thresholds`` overrides those that ship. Raises ConfigError for a model that cannot be loaded and,
    with what to install, for the embedding classifier without its extra.
    """
    confidence = {**shipped_thresholds(), **(thresholds or {})}
    made: list[Classifier] = []
    for name in names:
        if name == "keyword":
            made.append(KeywordClassifier.shipped())
        elif name == "tfidf":
            made.append(
                TfidfClassifier(load_model(tfidf_model)) if tfidf_model else TfidfClassifier.shipped()
            )
        else:
            made.append(EmbeddingClassifier.load(embedding_model or SHIPPED_MODEL))
    return Cascade(
        [(classifier, confidence[classifier.name]) for classifier in made],
        pooled_threshold=confidence[POOLED],
        weights=shipped_weights(names),
    )


def classifier_of(settings: Settings) -> Classifier:
    """The classifier that ``settings`` ask for. Raises ConfigError."""
    return build_classifier(
        parse_names(settings.classifier),
        thresholds=settings.thresholds,
        tfidf_model=settings.tfidf_model,
        embedding_model=settings.embedding_model,
    )


@cache
def default_classifier() -> Classifier:
    """The cascade that a run asks unless told otherwise, made once."""
    return build_classifier(parse_names(DEFAULT_CLASSIFIERS))
