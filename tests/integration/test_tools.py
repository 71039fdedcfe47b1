"""The real engine calls a tool, through OpenAI's and Ollama's routes and their clients.

The operator's ``set_parameters`` makes every request call one, also where the client's API cannot say so.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Iterator
from typing import Any

import ollama
import openai
import pytest
from langchain_ollama import ChatOllama

from moe_proxy.engine.build import EngineBuild
from tests.support.proxy_process import ProxyProcess
from tests.support.text import CODE
from tests.support.tools import CALL_TOKENS, MUST_CALL, TEMPLATE_ARGS, TOOL

pytestmark = pytest.mark.engine

MODEL = "planted-moe"
MESSAGES: list[Any] = [{"role": "user", "content": CODE}]
CITIES = ("Oslo", "Bergen")


@pytest.fixture(scope="module")
def proxy(engine: EngineBuild, module_proxy_env: dict[str, str]) -> Iterator[ProxyProcess]:
    """One proxy for all tests here."""
    env = module_proxy_env | {"MOE_PROXY_SET_PARAMETERS": MUST_CALL}
    running = ProxyProcess.start(env, ("--ctx-size", "4096"), TEMPLATE_ARGS)
    running.wait_ready()
    yield running
    running.end()


def test_openai(openai_client: openai.OpenAI) -> None:
    """Chat completions: a call of the tool with arguments of its schema, whole and in fragments."""
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": MESSAGES,
        "tools": [TOOL],
        "max_tokens": CALL_TOKENS,
        "temperature": 0,
    }
    answer = openai_client.chat.completions.create(**asked)
    call = (answer.choices[0].message.tool_calls or [])[0]
    assert call.id
    assert call.function.name == "weather"  # type: ignore[union-attr]
    assert json.loads(call.function.arguments)["city"] in CITIES  # type: ignore[union-attr]
    with openai_client.chat.completions.create(**asked, stream=True) as stream:
        parts = [part.choices[0].delta.tool_calls or [] for part in stream if part.choices]
    first = [call for calls in parts for call in calls if call.index == 0]
    fragments = [call.function.arguments or "" for call in first if call.function]
    assert len(fragments) > 1
    assert json.loads("".join(fragments))["city"] in CITIES


@pytest.mark.parametrize("stream", [True, False])
def test_ollama(ollama_client: ollama.Client, stream: bool) -> None:
    """/api/chat: calls with arguments as objects, then done."""
    assert "tools" in (ollama_client.show(MODEL).capabilities or [])

    options = {"num_predict": CALL_TOKENS, "temperature": 0}
    answer: Any = ollama_client.chat(MODEL, MESSAGES, tools=[TOOL], stream=stream, options=options)
    parts = list(answer) if stream else [answer]
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count
    # However many there are, they come in one object.
    (calls,) = [part.message.tool_calls for part in parts if part.message.tool_calls]
    assert calls[0].function.name == "weather"
    assert calls[0].function.arguments["city"] in CITIES


def test_ollama_as_it_is_sent(proxy: ProxyProcess) -> None:
    """On the wire, a call has what other clients need: an id, an index, an object."""
    body = {
        "model": MODEL,
        "messages": MESSAGES,
        "tools": [TOOL],
        "stream": False,
        "options": {"num_predict": CALL_TOKENS, "temperature": 0},
    }
    call = proxy.post("/api/chat", body)["message"]["tool_calls"][0]
    assert call["id"]
    assert call["function"]["index"] == 0
    assert call["function"]["arguments"]["city"] in CITIES


def test_langchain_ollama(proxy: ProxyProcess) -> None:
    """langchain-ollama's bound tools: a call with parsed arguments, streamed."""
    chat = ChatOllama(model=MODEL, base_url=proxy.url, num_predict=CALL_TOKENS, temperature=0)
    answer = functools.reduce(operator.add, chat.bind_tools([TOOL]).stream(CODE))
    assert answer.tool_calls[0]["name"] == "weather"
    assert answer.tool_calls[0]["args"]["city"] in CITIES
    chat._client._client.close()
