"""docs/benchmarks.md and README's table: what stands there is what the committed result file says."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
RESULT: dict[str, Any] = json.loads((ROOT / "docs/benchmarks.json").read_text(encoding="utf-8"))


def _page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check_page", ROOT / "scripts/gpu_check/page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_program_makes_of_the_result() -> None:
    """Results go into docs/benchmarks.md by a program, with GPU, commit and command."""
    text = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    proxy_page = (ROOT / "docs/bench-proxy.md").read_text(encoding="utf-8")
    assert text == _page().page(RESULT, proxy_page)
    # And for what the proxy adds: every figure, with its aim and verdict, and the conditions.
    figures = [line for line in proxy_page.splitlines() if line.startswith(("| ", "Conditions: "))]
    assert len(figures) > 10
    assert all(line in text for line in figures)
    for fact in (RESULT["conditions"]["gpu"].split(",")[0], RESULT["conditions"]["commit"]):
        assert fact in text


def test_a_goal_that_was_missed_says_so() -> None:
    """A row that misses its bar is printed as it is."""
    row = {"share": 40, "paged": {"decode_median": 31.9, "prefill_median": 14}}
    row["stock"] = {"decode_median": 10, "prefill_median": 10}
    assert _page()._goal(row) == "| 40 % | 3.20 | 3.19, missed | 1.40 | 1.40 |"


def test_readme_quotes_the_result() -> None:
    """README shows the one table, with the figures of the result file."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for row in RESULT["rows"]:
        own, stock = row["paged"], row["stock"]
        hits = sorted(own["hits"])[len(own["hits"]) // 2]
        assert (
            f"| {row['share']} % | {own['vram_mib'] / 1024:.1f} GiB | {hits:.0%} |"
            f" {own['decode_median']:.0f} | {stock['decode_median']:.0f} |"
        ) in readme
