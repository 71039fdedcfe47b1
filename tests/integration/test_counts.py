"""What the pager counts is what the model routed."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from moe_proxy.engine.build import EngineBuild
from moe_proxy.engine.toolchain import find_toolchain
from tests.support.engine_process import engine_process
from tests.support.text import CODE, STORY, call

pytestmark = pytest.mark.engine

GENERATED = 96


@pytest.fixture(scope="module")
def routing_trace(
    stock_engine: EngineBuild, llama_source: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A program on unpatched llama.cpp that counts experts through its graph callback."""
    program = tmp_path_factory.mktemp("trace") / "routing-trace"
    libraries = stock_engine.server.parent
    source = Path(__file__).parents[2] / "native" / "tests" / "routing-trace.cpp"
    argv = [str(find_toolchain(cuda=False).cxx), "-std=c++17", "-O1", str(source), "-o", str(program)]
    argv += [f"-I{llama_source / folder}" for folder in ("include", "ggml/include")]
    argv += [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lllama", "-lggml", "-lggml-base"]
    subprocess.run(argv, check=True)
    return program


def _traced(program: Path, model: Path, prompt: list[int], generated: list[int]) -> dict[str, list[int]]:
    """Counts by layer: ``prompt`` at once, then all but the last of ``generated`` one by one."""
    argv = [str(program), str(model), *map(str, prompt)]
    if generated[:-1]:
        argv += ["--decode", ",".join(map(str, generated[:-1]))]
    counts: dict[str, list[int]] = json.loads(subprocess.run(argv, check=True, capture_output=True).stdout)[
        "layers"
    ]
    return counts


def _complete(socket: Path, tokens: list[int], request: str) -> list[int]:
    """Greedy completion of the prompt ``tokens`` under a request id; the generated tokens."""
    body = {
        "prompt": tokens,
        "n_predict": GENERATED,
        "temperature": 0,
        "cache_prompt": False,
        "ignore_eos": True,
        "return_tokens": True,
    }
    answer: list[int] = call(socket, "POST", "/completion", body, {"X-Moe-Request": request})["tokens"]
    return answer


def _tokens(socket: Path, text: str) -> list[int]:
    tokens: list[int] = call(socket, "POST", "/tokenize", {"content": text})["tokens"]
    return tokens


def _usage(socket: Path, request: str) -> dict[str, Any]:
    usage: dict[str, Any] = call(socket, "GET", f"/experts/usage?request={request}")
    return usage


def test_counts_equal_the_graph_callback(
    engine: EngineBuild, planted_model: Path, routing_trace: Path
) -> None:
    """Counts of GET /experts/usage equal those of llama.cpp's own graph callback, exactly."""
    with engine_process(engine.server, planted_model, MOE_PAGER="1") as socket:
        prompt = _tokens(socket, CODE)
        generated = _complete(socket, prompt, "one")
        assert _usage(socket, "one")["layers"] == _traced(routing_trace, planted_model, prompt, generated)


def test_concurrent_requests_are_counted_apart(
    engine: EngineBuild, planted_model: Path, routing_trace: Path
) -> None:
    """Two concurrent requests of different domains are each attributed their own picks, exactly."""
    with engine_process(engine.server, planted_model, MOE_PAGER="1") as socket:
        prompts = {"code": _tokens(socket, CODE), "story": _tokens(socket, STORY)}
        generated: dict[str, list[int]] = {}
        before = call(socket, "GET", "/experts/stats")["snapshot"]
        together = threading.Barrier(len(prompts))

        def run(name: str) -> None:
            together.wait()
            generated[name] = _complete(socket, prompts[name], name)

        threads = [threading.Thread(target=run, args=(name,)) for name in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ubatches = call(socket, "GET", f"/experts/stats?since={before}")["delta"]["ubatches"]
        assert ubatches < 2 * GENERATED, "they did not run together, so the test says nothing"
        for name, prompt in prompts.items():
            traced = _traced(routing_trace, planted_model, prompt, generated[name])
            assert _usage(socket, name)["layers"] == traced
        assert _usage(socket, "code")["layers"] != _usage(socket, "story")["layers"]
