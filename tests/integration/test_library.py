"""The library on the real engine: the examples of docs/library.md, and that it says what the engine says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_proxy import HybridMoERuntime
from moe_proxy.engine.build import EngineBuild
from tests.support.fake_engine import gone
from tests.support.proxy_process import ProxyProcess, run_cli

pytestmark = pytest.mark.engine

PAGE = Path(__file__).parents[2] / "docs" / "library.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def _run(program: str, env: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("example", [text for text in EXAMPLES if "attach=" not in text])
def test_the_examples_of_the_page(example: str, proxy_env: dict[str, str], engine: EngineBuild) -> None:
    """An example in docs/library.md runs as it is, and leaves nothing in the runtime folder."""
    assert len(_run(example, proxy_env).split()) > 10
    assert list(Path(proxy_env["MOE_PROXY_RUNTIME_DIR"]).iterdir()) == []


def test_the_example_that_attaches(
    proxy_env: dict[str, str], start_proxy: Callable[..., ProxyProcess]
) -> None:
    """The example that attaches uses a running proxy and leaves it running."""
    (example,) = [text for text in EXAMPLES if "attach=" in text]
    proxy = start_proxy()
    assert _run(example.replace("http://127.0.0.1:11435", proxy.url), proxy_env).strip()
    assert proxy.settled_requests()[-1]["path"] == "/v1/chat/completions"
    assert proxy.get("/health")["status"] == "ok"


def test_the_pager_works_for_the_library(
    own_folders: None,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    cache_dir: Path,
    engine: EngineBuild,
) -> None:
    """Same objects as the proxy: prompts are classified, priors pushed, picks counted."""
    monkeypatch.setenv("MOE_PROXY_CACHE_DIR", str(cache_dir))
    monkeypatch.setenv("MOE_PROXY_RUNTIME_DIR", str(tmp_path_factory.mktemp("r")))
    with HybridMoERuntime("planted-moe", ram_budget="40%", threads=2) as moe:
        first = moe.generate("print hello world", max_tokens=24, temperature=0)
        again = moe.generate("print hello world", max_tokens=24, temperature=0, cache_prompt=False)
        assert first.text == again.text != ""
        assert first.completion_tokens <= 24
        stats = moe.stats()
        assert stats["experts"]["picks"] > 0
        assert stats["prior"]["pushed"] > 0
        assert stats["requests"]["domains"] == {"codegen": 2}
        pid = stats["engine"]["pid"]
    assert gone(pid)


def test_a_benchmark_on_the_real_engine(
    proxy_env: dict[str, str], engine: EngineBuild, tmp_path: Path
) -> None:
    """`bench` measures the pager beside the same build with the pager off, with hit rates for it alone."""
    output = tmp_path / "r.json"
    arguments = ("--budgets", "30%", "--prompt-tokens", "48", "--tokens", "8", "--runs", "1")
    done = run_cli(proxy_env, "bench", "--model", "planted-moe", *arguments, "--output", str(output))
    assert done.returncode == 0, done.stderr
    paged, stock = json.loads(output.read_text())["rows"]
    assert (paged["arm"], stock["arm"]) == ("pager 30%", "stock")
    for row in (paged, stock):
        median = row["median"]
        assert (median["prompt_tokens"], median["completion_tokens"]) == (48, 8)
        assert min(median["prompt_per_s"], median["decode_per_s"], median["first_token_s"]) > 0
        assert median["rss_bytes"] > 2**20
    assert 0 < paged["median"]["hit_rate"] < 1
    assert stock["median"]["hit_rate"] is None
