"""The official Python clients of OpenAI and Ollama work unchanged, on the real engine."""

from __future__ import annotations

from collections.abc import Iterator

import ollama
import openai
import pytest

from moe_proxy.engine.build import EngineBuild
from tests.support.proxy_process import ProxyProcess
from tests.support.text import CODE, STORY

pytestmark = pytest.mark.engine

MESSAGES = [{"role": "user", "content": CODE}]


@pytest.fixture(scope="module")
def proxy(
    tmp_path_factory: pytest.TempPathFactory, engine: EngineBuild, module_proxy_env: dict[str, str]
) -> Iterator[ProxyProcess]:
    """One proxy for all tests here."""
    running = ProxyProcess.start(module_proxy_env, ("--ram-budget", "30%"), ())
    running.wait_ready()
    yield running
    running.end()


def test_openai_chat(openai_client: openai.OpenAI) -> None:
    """/v1/chat/completions without stream."""
    answer = openai_client.chat.completions.create(model="planted-moe", messages=MESSAGES, max_tokens=8)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_openai_chat_stream(openai_client: openai.OpenAI) -> None:
    """/v1/chat/completions with stream: chunks, a finish reason, the end."""
    stream = openai_client.chat.completions.create(
        model="planted-moe", messages=MESSAGES, max_tokens=8, stream=True
    )
    with stream:
        chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        "length"
    ]


def test_openai_completions(openai_client: openai.OpenAI) -> None:
    """/v1/completions."""
    answer = openai_client.completions.create(model="planted-moe", prompt="def sort", max_tokens=8)
    assert answer.choices[0].text


def test_openai_models(openai_client: openai.OpenAI) -> None:
    """/v1/models lists the same name as /api/tags."""
    assert [model.id for model in openai_client.models.list()] == ["planted-moe:latest"]


def test_openai_error(openai_client: openai.OpenAI) -> None:
    """An error arrives as the client's own exception with the server's words."""
    with pytest.raises(openai.BadRequestError, match="messages"):
        openai_client.chat.completions.create(model="planted-moe", messages=None)  # type: ignore[call-overload]


def test_ollama_chat(ollama_client: ollama.Client) -> None:
    """/api/chat without stream, with its counters."""
    answer = ollama_client.chat("planted-moe", messages=MESSAGES, options={"num_predict": 8})
    assert answer.message.content
    assert answer.done
    assert answer.done_reason == "length"
    assert answer.eval_count == 8
    assert answer.prompt_eval_count
    assert answer.eval_duration


def test_ollama_chat_stream(ollama_client: ollama.Client) -> None:
    """/api/chat with stream: text, then one final chunk."""
    chunks = list(
        ollama_client.chat("planted-moe", messages=MESSAGES, stream=True, options={"num_predict": 8})
    )
    assert "".join(chunk.message.content or "" for chunk in chunks)
    assert [chunk.done for chunk in chunks].count(True) == 1
    assert chunks[-1].done


def test_ollama_generate(ollama_client: ollama.Client) -> None:
    """/api/generate, streaming and not, gives the same greedy text."""
    options = {"num_predict": 12, "temperature": 0}
    whole = ollama_client.generate("planted-moe", STORY, options=options)
    parts = ollama_client.generate("planted-moe", STORY, options=options, stream=True)
    assert whole.response
    assert whole.response == "".join(part.response for part in parts)


def test_ollama_information(ollama_client: ollama.Client) -> None:
    """/api/tags, /api/show and /api/ps describe the served model."""
    assert [model.model for model in ollama_client.list().models] == ["planted-moe:latest"]
    shown = ollama_client.show("planted-moe")
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.architecture"] == "qwen3moe"
    assert [model.model for model in ollama_client.ps().models] == ["planted-moe:latest"]


def test_ollama_unknown_model(ollama_client: ollama.Client) -> None:
    """An unknown name is 404 in Ollama's words."""
    with pytest.raises(ollama.ResponseError, match="model 'nothing' not found") as caught:
        ollama_client.chat("nothing", messages=MESSAGES)
    assert caught.value.status_code == 404


def test_stats_tell_the_requests(proxy: ProxyProcess, openai_client: openai.OpenAI) -> None:
    """/stats shows the domain of a finished request and the picks that the pager counted for it."""
    openai_client.chat.completions.create(model="planted-moe", messages=MESSAGES, max_tokens=8)
    last = proxy.settled_requests()[-1]
    assert last["domain"] == "codegen"
    assert last["prior"]
    assert last["picks"] > 0
    assert 0 < last["hits"] <= last["picks"]
