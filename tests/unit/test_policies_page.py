"""docs/policies.md: it says what the committed result file says, and the default wins where it must."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
RESULT: dict[str, Any] = json.loads((ROOT / "docs/policies.json").read_text(encoding="utf-8"))
SHARES = ["5", "10", "20", "40", "60"]


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/simulate_policies/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_program_makes_of_the_result() -> None:
    """The simulator's table of posterior, LRU, LFU, static, Belady at 5, 10, 20, 40, 60 %."""
    text = (ROOT / "docs/policies.md").read_text(encoding="utf-8")
    assert text == _script("page").page(RESULT)
    for trace in RESULT.values():
        assert {"posterior", "lru", "lfu", "static", "belady"} <= trace["policies"].keys()
        assert all(list(row) == SHARES for row in trace["policies"].values())


def test_nothing_beats_the_offline_bound() -> None:
    """Belady is the offline bound for tokens that are decoded one at a time."""
    for trace in RESULT.values():
        for share in SHARES:
            bound = trace["policies"]["belady"][share]["decode_hits"]
            assert all(row[share]["decode_hits"] <= bound for row in trace["policies"].values())


def test_the_default_follows_the_demonstration_models_text() -> None:
    """The default half-life wins on the trained demo model's trace against the longer ones it had before."""
    trace = RESULT["demonstration model"]
    for share in SHARES:
        hits = {tokens: row[share]["decode_hits"] for tokens, row in trace["half_lives"].items()}
        assert trace["policies"]["posterior"][share]["decode_hits"] == hits["64"] > hits["128"] > hits["256"]


def test_a_trace_is_written_as_the_simulator_reads_it(tmp_path: Path) -> None:
    """The format of native/src/trace-writer.h: a line of JSON, then batches of rows of ids per layer."""
    picks = np.array([[[1, 2], [3, 4]]], np.uint8)
    _script("demo_trace").write_trace(tmp_path / "t", iter([picks]), experts=5)
    line, _, rest = (tmp_path / "t").read_bytes().partition(b"\n")
    layer = {"experts": 5, "expert_bytes": 1, "pinned": False}
    layers = [{"block": 0, **layer}, {"block": 1, **layer}]
    assert json.loads(line) == {"format": "moe-routing-trace", "version": 1, "layers": layers}
    assert rest == np.array([1, 0], "<u4").tobytes() + b"".join(
        np.array([1, 2], "<u4").tobytes() + np.array(ids, "<u2").tobytes() for ids in ([1, 2], [3, 4])
    )
