"""Replays routing traces under each policy and writes docs/policies.json and docs/policies.md.

Usage: python scripts/simulate_policies [--simulator PROGRAM] [--trace NAME=FILE[:SKIP]]... [--output docs]
       python scripts/simulate_policies --report [--output docs]

The trained demonstration model's trace is always among them. FILE comes from an engine that ran with
MOE_PAGER_TRACE=FILE; its first SKIP batches are replayed and not counted. Without --simulator it is built
from native/, which takes a minute. --report makes the page of the result that is there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from demo_trace import EXPERTS, ubatches, write_trace
from page import page

from moe_proxy.config import load_settings
from moe_proxy.engine.source import llama_cpp_tree
from moe_proxy.files import write_text

ROOT = Path(__file__).resolve().parents[2]
RECORDING = ROOT / "scripts" / "train_demo_moe" / "results" / "routing-trace.npz"
SHARES = (5, 10, 20, 40, 60)
HALF_LIVES = (16, 32, 64, 128, 256, 512)
HORIZONS = (16, 64, 256)


def build_simulator(folder: Path) -> Path:
    """Build moe-pager-simulate in ``folder``; the program. Raises CalledProcessError."""
    tools = Path(sys.executable).parent
    source = llama_cpp_tree(load_settings({}).cache_dir)
    configure = [str(tools / "cmake"), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"]
    configure += ["-DCMAKE_BUILD_TYPE=Release", f"-DLLAMA_CPP_SOURCE={source}"]
    subprocess.run([*configure, "-S", str(ROOT / "native"), "-B", str(folder)], check=True, stdout=sys.stderr)
    build = [str(tools / "cmake"), "--build", str(folder), "--target", "moe-pager-simulate"]
    subprocess.run(build, check=True, stdout=sys.stderr)
    return folder / "simulator" / "moe-pager-simulate"


def figures(row: dict[str, Any]) -> dict[str, float]:
    """Hit rates in percent and promotions per token, of the decoded tokens, and hits of all."""
    return {
        "hits": round(100 * row["hits"] / row["picks"], 2),
        "decode_hits": round(100 * row["decode_hits"] / max(1, row["decode_picks"]), 2),
        "decode_moves": round(row["decode_promotions"] / max(1, row["decoded_tokens"]), 2),
    }


def simulate(program: Path, trace: Path, skip: int) -> dict[str, Any]:
    """Every policy, and the default one with other half-lives and horizons. Raises CalledProcessError."""

    def run(*options: str) -> list[dict[str, Any]]:
        argv = [str(program), str(trace), "--json", "--skip", str(skip)]
        argv += ["--share", ",".join(map(str, SHARES)), *options]
        rows: list[dict[str, Any]] = json.loads(
            subprocess.run(argv, check=True, stdout=subprocess.PIPE).stdout
        )
        return rows

    def default(*options: str) -> dict[str, Any]:
        rows = run("--policy", "posterior", *options)
        return {f"{row['share_percent']:g}": figures(row) for row in rows}

    policies: dict[str, dict[str, Any]] = {}
    rows = run()
    for row in rows:
        policies.setdefault(row["policy"], {})[f"{row['share_percent']:g}"] = figures(row)
    return {
        "tokens": rows[0]["tokens"],
        "decoded_tokens": rows[0]["decoded_tokens"],
        "policies": policies,
        "half_lives": {str(tokens): default("--half-life", str(tokens)) for tokens in HALF_LIVES},
        "horizons": {str(tokens): default("--horizon", str(tokens)) for tokens in HORIZONS},
    }


def main() -> None:
    """Parse the arguments, replay, write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--simulator", type=Path)
    parser.add_argument("--trace", action="append", default=[], metavar="NAME=FILE[:SKIP]")
    parser.add_argument("--output", type=Path, default=ROOT / "docs")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    result_path = arguments.output / "policies.json"
    if arguments.report:
        result = json.loads(result_path.read_text(encoding="utf-8"))
    else:
        with tempfile.TemporaryDirectory() as folder:
            demo = Path(folder) / "demo.trace"
            write_trace(demo, ubatches(RECORDING), EXPERTS)
            traces = {"demonstration model": (demo, 0)}
            for given in arguments.trace:
                name, _, rest = given.partition("=")
                file, _, skip = rest.partition(":")
                if not name or not Path(file).is_file() or not (skip or "0").isdigit():
                    parser.error(f"--trace {given!r} is not NAME=FILE[:SKIP] of a file that is there")
                traces[name] = (Path(file), int(skip or 0))
            program = arguments.simulator or build_simulator(Path(folder) / "build")
            try:
                result = {name: simulate(program, *trace) for name, trace in traces.items()}
            except (OSError, subprocess.CalledProcessError) as error:
                sys.exit(f"simulate_policies: {error}")
        write_text(result_path, json.dumps(result, indent=1) + "\n")
    write_text(arguments.output / "policies.md", page(result))


if __name__ == "__main__":
    main()
