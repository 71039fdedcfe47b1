"""Clients beyond the two official Python ones, and what they do beyond plain chat, on the real engine.

The shipped model's own template knows no tools, so the engine is given one that does.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI

from moe_proxy.engine.build import EngineBuild
from tests.support.proxy_process import ProxyProcess, wait_until
from tests.support.text import CODE, STORY
from tests.support.tools import PARAMETERS, TEMPLATE_ARGS, TOOL

pytestmark = pytest.mark.engine

MODEL = "planted-moe"
MESSAGES: list[Any] = [{"role": "user", "content": CODE}]
# Far more than any test waits for.
LONG = 4000
# After these, one call is whole and a second one has begun; what stops there is taken as it is.
CALL_TOKENS = 52
NPM_CLIENT = "ollama@0.6.4"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
Start = Callable[..., ProxyProcess]


@pytest.fixture(scope="module")
def proxy(engine: EngineBuild, module_proxy_env: dict[str, str]) -> Iterator[ProxyProcess]:
    """One proxy for all tests here but those of embeddings."""
    running = ProxyProcess.start(module_proxy_env, ("--slots", "2", "--ctx-size", "4096"), TEMPLATE_ARGS)
    running.wait_ready()
    yield running
    running.end()


def _nothing_runs(proxy: ProxyProcess) -> None:
    """The engine's slots are free and the proxy serves nobody.

    Asked seldom: llama-server looks whether the client of an answer that is not streamed is still there only
    when nothing at all has come out of its queue for a second, and this question comes out of it too.
    """

    for _ in range(10):
        time.sleep(1.5)
        slots = proxy.get("/slots")
        if not any(slot["is_processing"] for slot in slots) and not proxy.get("/stats")["requests"]["active"]:
            return
    raise AssertionError(f"still at work: {slots}")


def test_openai_structured_output(openai_client: openai.OpenAI) -> None:
    """``response_format`` with a schema gives JSON of that schema."""
    answer = openai_client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=300,
        response_format={"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}},
    )  # fmt: skip
    assert set(json.loads(answer.choices[0].message.content or "")) == {"city", "warm"}


def test_openai_responses(openai_client: openai.OpenAI) -> None:
    """/v1/responses, whole and streamed to its ``response.completed``."""
    answer = openai_client.responses.create(model=MODEL, input=CODE, max_output_tokens=8)
    assert answer.output_text
    with openai_client.responses.create(model=MODEL, input=CODE, max_output_tokens=8, stream=True) as stream:
        kinds = [event.type for event in stream]
    assert kinds[-1] in ("response.completed", "response.incomplete")


async def test_openai_abort(proxy: ProxyProcess) -> None:
    """A stream that is closed, and a request that is cancelled before its answer, free the engine's slot."""
    async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {
            "model": MODEL, "messages": MESSAGES, "max_tokens": LONG, "extra_body": {"ignore_eos": True},
        }  # fmt: skip
        stream = await client.chat.completions.create(**asked, stream=True)
        await anext(aiter(stream))
        await stream.close()
        await asyncio.to_thread(_nothing_runs, proxy)
        task = asyncio.ensure_future(client.chat.completions.create(**asked))
        await asyncio.to_thread(
            wait_until, lambda: any(slot["is_processing"] for slot in proxy.get("/slots")), "it is computed"
        )
        task.cancel()
        await asyncio.to_thread(_nothing_runs, proxy)


@pytest.mark.parametrize("format_", ["json", SCHEMA], ids=["json", "schema"])
def test_ollama_format(ollama_client: ollama.Client, format_: Any) -> None:
    """``format`` gives JSON, of a schema where there is one, by chat and by generate."""
    options = {"num_predict": 300, "temperature": 0}
    texts = [
        ollama_client.chat(MODEL, MESSAGES, format=format_, options=options).message.content or "",
        ollama_client.generate(MODEL, CODE, format=format_, options=options).response,
    ]
    for text in texts:
        # Any JSON may go on for ever, and is then cut; one of the schema ends.
        if format_ == "json":
            assert text.lstrip().startswith("{")
        else:
            assert set(json.loads(text)) == {"city", "warm"}


def test_ollama_tools(ollama_client: ollama.Client) -> None:
    """Tools are taken where the template knows them; calls and results of former turns go through it."""
    assert "tools" in (ollama_client.show(MODEL).capabilities or [])
    call = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    messages = [
        {"role": "user", "content": STORY},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": "sun"},
    ]
    # Where a call may begin and none has to, this model begins one and does not keep to its form.
    options = {"num_predict": 1}
    whole = ollama_client.chat(MODEL, messages, tools=[TOOL], options=options)
    assert whole.done
    parts = list(ollama_client.chat(MODEL, messages, tools=[TOOL], options=options, stream=True))
    assert parts[-1].done
    plain = ollama_client.chat(MODEL, messages[:1], options=options)
    assert (whole.prompt_eval_count or 0) > (plain.prompt_eval_count or 0)


def test_ollama_raw_and_thinking(ollama_client: ollama.Client) -> None:
    """Raw goes in as it is, without the template's tokens; ``think: false`` reaches the template."""
    options = {"num_predict": 4, "temperature": 0}
    raw = ollama_client.generate(MODEL, "one two three", raw=True, options=options)
    loud = ollama_client.generate(MODEL, "one two three", options=options, think=True)
    quiet = ollama_client.generate(MODEL, "one two three", options=options, think=False)
    assert (raw.prompt_eval_count or 0) < (loud.prompt_eval_count or 0) < (quiet.prompt_eval_count or 0)
    with pytest.raises(ollama.ResponseError, match="does not support insert"):
        ollama_client.generate(MODEL, "a", suffix="b")


def test_ollama_load_and_unload(start_proxy: Start) -> None:
    """``keep_alive: 0`` without a prompt ends llama-server, and the next request starts it again."""
    proxy = start_proxy()
    pid = proxy.engine_pid()
    client = ollama.Client(host=proxy.url)
    assert client.generate(MODEL, keep_alive=0).done_reason == "unload"
    wait_until(lambda: proxy.get("/stats")["engine"]["state"] == "asleep", "llama-server has ended")
    assert client.ps().models == []
    assert proxy.get("/health") == {"status": "ok", "state": "asleep"}
    assert client.chat(MODEL, MESSAGES, options={"num_predict": 2}).message.content
    assert proxy.engine_pid() != pid
    assert [model.model for model in client.ps().models] == [f"{MODEL}:latest"]
    assert client.generate(MODEL).done_reason == "load"
    client._client.close()


def test_anthropic(proxy: ProxyProcess) -> None:
    """/v1/messages: whole, streamed, with a tool, and counted."""
    with anthropic.Anthropic(base_url=proxy.url, api_key="none", max_retries=0) as client:
        whole = client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=8)
        assert whole.content[0].text  # type: ignore[union-attr]
        assert whole.usage.output_tokens == 8
        with client.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=8) as stream:
            assert "".join(stream.text_stream)
        assert stream.current_message_snapshot.stop_reason == "max_tokens"
        assert client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens > 0
        called = client.messages.create(
            model=MODEL, messages=MESSAGES, max_tokens=CALL_TOKENS, extra_body={"temperature": 0},
            tool_choice={"type": "any"},
            tools=[{"name": "weather", "input_schema": PARAMETERS}],
        )  # fmt: skip
        uses = [block for block in called.content if block.type == "tool_use"]
        assert uses[0].name == "weather"
        assert uses[0].input["city"] in ("Oslo", "Bergen")


def test_langchain_openai(proxy: ProxyProcess) -> None:
    """langchain-openai: invoke, stream, a bound tool, structured output."""
    web = httpx.Client()
    chat = ChatOpenAI(
        http_client=web,
        model=MODEL,
        base_url=f"{proxy.url}/v1",
        api_key="none",
        max_tokens=300,
        max_retries=0,
    )  # type: ignore[arg-type,call-arg]
    short = chat.bind(max_tokens=8)
    assert short.invoke(CODE).content
    assert sum(len(str(part.content)) for part in short.stream(CODE)) > 0
    caller = chat.bind_tools([TOOL], tool_choice="required").bind(max_tokens=CALL_TOKENS, temperature=0)
    calls = caller.invoke(CODE).tool_calls
    assert calls[0]["name"] == "weather"
    made = chat.with_structured_output({"title": "w", **SCHEMA}, method="json_schema").invoke(CODE)
    assert set(made) == {"city", "warm"}  # type: ignore[arg-type]
    web.close()


async def test_langchain_ollama(proxy: ProxyProcess) -> None:
    """langchain-ollama: invoke, stream, bound tools, structured output."""
    chat = ChatOllama(model=MODEL, base_url=proxy.url, num_predict=300, temperature=0)
    short = ChatOllama(model=MODEL, base_url=proxy.url, num_predict=8)
    assert short.invoke([HumanMessage(CODE)]).content
    parts = [part async for part in short.astream(CODE)]
    assert all(isinstance(part, AIMessageChunk) for part in parts)
    assert parts[-1].response_metadata.get("done") or any(
        part.response_metadata.get("done") for part in parts
    )
    single = ChatOllama(model=MODEL, base_url=proxy.url, num_predict=1)
    assert single.bind_tools([TOOL]).invoke(STORY).response_metadata["done"]
    made = chat.with_structured_output(SCHEMA, method="json_schema").invoke(CODE)
    assert set(made) == {"city", "warm"}  # type: ignore[arg-type]
    for made_client in (chat, short, single):
        made_client._client._client.close()
        await made_client._async_client._client.aclose()


def test_embeddings(start_proxy: Start) -> None:
    """Embeddings through all clients, and a text that is longer than the engine takes at once."""
    proxy = start_proxy(engine_args=("--embeddings", "--pooling", "mean", "--ubatch-size", "64"))
    client = ollama.Client(host=proxy.url)
    assert "embedding" in (client.show(MODEL).capabilities or [])
    one, two = client.embed(MODEL, [CODE, STORY]).embeddings
    assert sum(x * x for x in one) == pytest.approx(1.0)
    assert one != two
    assert client.embed(MODEL, CODE, dimensions=8).embeddings[0] == pytest.approx(
        [x / sum(y * y for y in one[:8]) ** 0.5 for x in one[:8]], rel=1e-4
    )
    long = f"{STORY} " * 40
    assert len(client.embed(MODEL, [CODE, long]).embeddings) == 2
    with pytest.raises(ollama.ResponseError, match="exceeds the context length"):
        client.embed(MODEL, long, truncate=False)
    assert len(client.embeddings(MODEL, CODE).embedding) == len(one)
    chained = OllamaEmbeddings(model=MODEL, base_url=proxy.url)
    assert chained.embed_query(CODE) == pytest.approx(one, abs=1e-5)
    assert chained._client is not None
    chained._client._client.close()
    with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0) as other:
        assert len(other.embeddings.create(model=MODEL, input=[CODE]).data[0].embedding) == len(one)
    client._client.close()


def test_no_embeddings(ollama_client: ollama.Client) -> None:
    """An engine that was started without embeddings says so."""
    with pytest.raises(ollama.ResponseError, match="does not support embeddings"):
        ollama_client.embed(MODEL, CODE)


SCRIPT = """
import { Ollama } from 'ollama'
const client = new Ollama({ host: process.argv[2] })
const model = 'planted-moe'
const messages = [{ role: 'user', content: 'Write a Python function that sorts a list.' }]
const options = { num_predict: 8, temperature: 0 }
const whole = await client.chat({ model, messages, options })
let text = '', last
for await (const part of await client.chat({ model, messages, options, stream: true })) {
  text += part.message.content
  last = part
}
const made = await client.generate({ model, prompt: 'hello', options, format: 'json' })
const shown = await client.show({ model })
const pulled = await client.pull({ model })
const failed = await client.chat({ model: 'nothing', messages }).catch((error) => error.message)
// What a grammar wants before the end cannot end before that.
const format = { type: 'array', items: { type: 'boolean' }, minItems: 300 }
const long = await client.chat({ model, messages, format, stream: true, options: { num_predict: 3000 } })
let aborted = ''
try {
  for await (const part of long) long.abort()
} catch (error) {
  aborted = error.name
}
console.log(JSON.stringify({
  whole: whole.message.content, text, done: last.done, made: made.response.length > 0,
  capabilities: shown.capabilities, pulled: pulled.status, failed, aborted,
  listed: (await client.list()).models.map((entry) => entry.model),
}))
"""


def test_ollama_npm(proxy: ProxyProcess, tmp_path: Path) -> None:
    """The official JavaScript client: chat, stream, format, show, list, pull, an error, abort."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node or npm is not installed")
    (tmp_path / "package.json").write_text('{"type": "module"}', encoding="utf-8")
    (tmp_path / "client.mjs").write_text(SCRIPT, encoding="utf-8")
    install = [npm, "install", "--silent", "--no-audit", "--no-fund", NPM_CLIENT]
    subprocess.run(install, cwd=tmp_path, check=True, timeout=120, capture_output=True)
    ran = subprocess.run(
        [node, "client.mjs", proxy.url],
        cwd=tmp_path,
        check=False,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["text"] == told["whole"] != ""
    assert (told["done"], told["made"], told["pulled"]) == (True, True, "success")
    assert told["failed"].startswith("model 'nothing' not found")
    assert told["aborted"] == "AbortError"
    assert told["listed"] == ["planted-moe:latest"]
    _nothing_runs(proxy)
