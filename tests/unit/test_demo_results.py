"""What was measured of the demonstration model: the page that says it, and the routing trace that ships."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from moe_proxy.resources import data_path

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "scripts" / "train_demo_moe"
RESULTS = PROGRAMS / "results"
LAYERS, EXPERTS, USED = 24, 32, 4


def _program(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"train_demo_moe_{name}", PROGRAMS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def report() -> ModuleType:
    """The program that writes the page."""
    return _program("report")


@pytest.fixture
def routing() -> ModuleType:
    """The program that replays picks."""
    return _program("routing")


def test_the_page_is_what_the_program_makes_of_the_results(report: ModuleType) -> None:
    """docs/demo-model.md is generated from what was measured on the shipped weights, and meets every bar."""
    text, missed = report.page(RESULTS, data_path("weights"))
    assert text == (ROOT / "docs" / "demo-model.md").read_text(encoding="utf-8")
    assert missed == []


def test_a_missed_bar_is_printed_as_missed(report: ModuleType, tmp_path: Path) -> None:
    """The true figure stands in the report: math that is 9 % better is a bar missed, prose is one met."""
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True)
    measured = json.loads((RESULTS / "measured.json").read_text())
    for domain in ("math", "prose"):
        measured["perplexity"][domain] |= {"dense": 10.0, "moe": 9.1}
    (tmp_path / "measured.json").write_text(json.dumps(measured))
    text, missed = report.page(tmp_path, data_path("weights"))
    assert [row.partition(":")[0] for row in missed] == ["held-out perplexity, math"]
    assert "10.00 → 9.10, 9 % lower" in missed[0]
    assert "(272,384 tokens) | **missed** |" in text


@pytest.fixture(scope="module")
def trace() -> dict[str, np.ndarray]:
    """The trace that ships: picks of the first held-out tokens of each domain."""
    with np.load(RESULTS / "routing-trace.npz") as archive:
        return dict(archive)


def test_the_trace_is_of_this_model(trace: dict[str, np.ndarray]) -> None:
    """1,024 tokens of each domain; for each token and layer the ids of four different experts."""
    assert set(trace) == set(json.loads((RESULTS / "measured.json").read_text())["perplexity"])
    for picks in trace.values():
        assert picks.shape == (1024, LAYERS, USED)
        assert picks.max() < EXPERTS
        assert np.all(np.diff(np.sort(picks, axis=2), axis=2) > 0)


def test_a_domains_hot_experts_cover_its_own_text_best(
    trace: dict[str, np.ndarray], routing: ModuleType
) -> None:
    """Replayed: the experts that are hot in the first half of a domain's tokens cover more of its second half
    than those of any other domain do."""
    layers = np.arange(LAYERS)[:, None]
    counts = {
        domain: [routing.counts_of(half, EXPERTS) for half in np.split(picks, 2)]
        for domain, picks in trace.items()
    }
    hot = {domain: np.argsort(-first, 1)[:, : round(0.4 * EXPERTS)] for domain, (first, _) in counts.items()}
    for domain, (_, second) in counts.items():
        covered = {other: second[layers, experts].sum() / second.sum() for other, experts in hot.items()}
        assert max(covered, key=covered.__getitem__) == domain, covered
        assert covered[domain] > 0.6


def test_a_cache_of_all_experts_misses_each_once(trace: dict[str, np.ndarray], routing: ModuleType) -> None:
    """Replayed: with room for all, only first picks miss; with less room, LRU never hits more."""
    for picks in trace.values():
        for layer in (0, LAYERS - 1):
            own = picks[:, layer]
            first = len(np.unique(own)) / own.size
            for hits in (routing.lru_hits, routing.lfu_hits):
                assert hits(own, EXPERTS) == pytest.approx(1 - first)
            rates = [routing.lru_hits(own, slots) for slots in (4, 8, 13, 32)]
            assert rates == sorted(rates)
