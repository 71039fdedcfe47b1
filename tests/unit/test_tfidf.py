"""The tfidf classifier: what it sees of a text, that its file runs no code, that it is quick."""

from __future__ import annotations

import pickle
import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_proxy.domains.base import DOMAINS
from moe_proxy.domains.keywords import KeywordClassifier
from moe_proxy.domains.tfidf import COLUMN_BITS, TfidfClassifier, TfidfModel, columns_of, load_model
from moe_proxy.errors import ConfigError

SHIPPED = TfidfClassifier.shipped()
SHIPPED_FILE = Path(__file__).parents[2] / "moe_proxy" / "domains" / "tfidf.npz"


@given(st.text())
def test_any_text_has_a_distribution_or_none(text: str) -> None:
    """Whatever the text is, the answer is a distribution over the domains or an abstention."""
    distribution = SHIPPED.classify(text).distribution
    assert not distribution or sum(distribution.values()) == pytest.approx(1.0, abs=1e-5)
    assert not distribution or set(distribution) == set(DOMAINS)


@given(st.text(min_size=1))
def test_columns_are_distinct_and_counted(text: str) -> None:
    """Columns ascend, lie in the model and occur at least once each."""
    columns, counts = columns_of(text)
    assert (np.diff(columns.astype(np.int64)) > 0).all()
    assert columns.max(initial=0) < 2**COLUMN_BITS
    assert (counts >= 1).all()


def test_a_feature_is_the_same_wherever_it_stands() -> None:
    """A word's column does not depend on its place: the hash of a run is free of its position."""
    word = set(columns_of("zebra")[0].tolist())
    assert word <= set(columns_of("a long way before zebra comes")[0].tolist())
    assert set(columns_of("zebra")[0].tolist()) == set(columns_of("  ZEBRA\n")[0].tolist())
    assert set(columns_of("123")[0].tolist()) == set(columns_of("987")[0].tolist())
    assert set(columns_of("器")[0].tolist()) & set(columns_of("限制容器的内存")[0].tolist())


@pytest.mark.parametrize("text", ["", "   ", "?!", "\n\n…"])
def test_a_text_without_letters_has_no_domain(text: str) -> None:
    """Nothing to go by: an abstention."""
    assert SHIPPED.classify(text).distribution == {}


def test_the_shipped_model_is_small() -> None:
    """At most 3 MB ship."""
    assert SHIPPED_FILE.stat().st_size <= 3_000_000


def test_save_and_load(tmp_path: Path) -> None:
    """A retrained model with labels of its own is read back as it was."""
    rng = np.random.default_rng(1)
    model = TfidfModel(
        ("law", "medicine"),
        np.ones(2**COLUMN_BITS, np.float16),
        rng.normal(size=(2**COLUMN_BITS, 2)).astype(np.float16),
        np.zeros(2, np.float32),
        {"source": "own"},
    )
    model.save(tmp_path / "own.npz")
    loaded = load_model(tmp_path / "own.npz")
    assert (loaded.labels, loaded.made) == (model.labels, {"source": "own"})
    assert TfidfClassifier(loaded).classify("hello") == TfidfClassifier(model).classify("hello")


class _Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return (pytest.fail, ("code was run",))


def test_a_model_runs_no_code(tmp_path: Path) -> None:
    """Pickled content, bare or inside an archive, is refused unread."""
    bare, inside = tmp_path / "bare.npz", tmp_path / "inside.npz"
    bare.write_bytes(pickle.dumps(_Bomb()))
    np.savez(inside, about=np.array([_Bomb()], object), idf=np.array([_Bomb()], object))
    for path in (bare, inside):
        with pytest.raises(ConfigError, match=path.name):
            load_model(path)


def test_malformed_models_are_refused(tmp_path: Path) -> None:
    """Each is refused with the file's name and the reason."""
    good = load_model(SHIPPED_FILE)
    bad = good.weights.copy()
    bad[5, 1] = np.inf
    for number, model in enumerate(
        (
            replace(good, labels=good.labels[1:]),
            replace(good, idf=good.idf[1:]),
            replace(good, weights=bad),
            replace(good, labels=("",) * len(good.labels)),
        )
    ):
        path = tmp_path / f"{number}.npz"
        model.save(path)
        with pytest.raises(ConfigError, match=path.name):
            load_model(path)
    with pytest.raises(ConfigError, match="does not exist"):
        load_model(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("hello", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"text\.npz"):
        load_model(tmp_path / "text.npz")


def test_it_is_quick_together_with_keyword() -> None:
    """Both cheap ones together fit the request path at any length (bounds with room for a slow machine)."""
    prose = "Write a function that computes the sum, and tell me why it fails on an empty list of names. "
    for text, bound_ms in (((prose * 30)[:2000], 5), ((prose * 3000)[:200_000], 15)):
        times = []
        for _ in range(15):
            start = time.thread_time()
            KeywordClassifier.shipped().classify(text)
            SHIPPED.classify(text)
            times.append(time.thread_time() - start)
        assert 1000 * statistics.median(times) < bound_ms
