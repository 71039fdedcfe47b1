"""Puts what the parts of gpu-check found into one file, RESULT/result.json, as docs/benchmarks.json is.

Usage: python scripts/gpu_check/merge.py RESULT
RESULT is a folder with what is there of benchmark.json, features.json and memcheck.txt.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any


def merged(folder: Path) -> dict[str, Any]:
    """The benchmark's result with the other parts' beside it."""
    benchmark = folder / "benchmark.json"
    result: dict[str, Any] = json.loads(benchmark.read_text()) if benchmark.exists() else {}
    features, memcheck = folder / "features.json", folder / "memcheck.txt"
    if features.exists():
        result["features"] = json.loads(features.read_text())
    if memcheck.exists():
        errors = re.findall(r"ERROR SUMMARY: (\d+) error", memcheck.read_text(errors="replace"))
        counters = json.loads((folder / "memcheck.txt.stats.json").read_text())
        result["memcheck"] = (
            f"{errors[-1] if errors else 'no number of'} errors, with {counters['promotions']} promotions and"
            f" {counters['demotions']} demotions meanwhile"
        )
    return result


def main() -> None:
    """Write the file."""
    folder = Path(sys.argv[1])
    part = folder / "result.json.part"
    part.write_text(json.dumps(merged(folder), indent=1) + "\n")
    part.replace(folder / "result.json")


if __name__ == "__main__":
    main()
