"""Ollama's request bodies to calls of llama-server, field by field."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from moe_proxy.errors import RequestError
from moe_proxy.proxy.ollama import models, request
from moe_proxy.proxy.ollama.request import ModelFacts, Translation
from tests.support.surface import card, header

ALL = frozenset({"completion", "tools", "thinking", "insert", "vision"})
FACTS = ModelFacts("planted-moe", 4096, ALL)
HELLO = [{"role": "user", "content": "hello"}]
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n0000").decode()
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def _chat(capabilities: frozenset[str] = ALL, **body: Any) -> Translation:
    facts = ModelFacts("planted-moe", 4096, capabilities)
    return request.chat("m:latest", {"messages": HELLO, **body}, facts)


def _chat_body(**body: Any) -> dict[str, Any]:
    call = _chat(**body).call
    assert call is not None
    assert call.path == "/v1/chat/completions"
    return dict(call.body)


def _generate_call(**body: Any) -> tuple[str, dict[str, Any]]:
    call = request.generate("m:latest", body, FACTS).call
    assert call is not None
    return call.path, dict(call.body)


def test_plain_chat() -> None:
    """The upstream alias, always a stream with usage, the prompt cache, nothing the client did not give."""
    assert _chat_body(model="m", unknown=1) == {
        "model": "planted-moe",
        "messages": HELLO,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_prompt": True,
    }
    assert _chat().stream is True
    assert _chat(stream=False).stream is False


@pytest.mark.parametrize(
    "absent",
    [{"tools": None}, {"tools": []}, {"format": ""}, {"format": None}, {"options": None}, {"think": None},
     {"options": {"temperature": None}}],
)  # fmt: skip
def test_null_is_absent(absent: dict[str, Any]) -> None:
    """Null options, tools and format, an empty list of tools and an empty format are as if absent."""
    assert _chat_body(**absent) == _chat_body()


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.1, "min_p": 0, "typical_p": 1}, None),
        ({"repeat_penalty": 1.1, "presence_penalty": 1, "frequency_penalty": 0.5}, None),
        ({"mirostat": 2, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "seed": 7}, None),
        ({"seed": -1}, {}),
        ({"seed": 7.0}, {"seed": 7}),
        ({"num_predict": 5}, {"n_predict": 5}),
        ({"num_predict": 0}, {"n_predict": 0}),
        ({"num_predict": -1}, {}),
        ({"num_predict": -2}, {}),
        ({"num_keep": 4}, {"n_keep": 4}),
        ({"num_keep": -5}, {"n_keep": -1}),
        ({"repeat_last_n": 64}, {"repeat_last_n": 64}),
        ({"repeat_last_n": -1}, {"repeat_last_n": 4096}),
        ({"stop": "END"}, {"stop": ["END"]}),
        ({"stop": ["a", "b"]}, {"stop": ["a", "b"]}),
        ({"num_ctx": 2048, "num_gpu": 1, "use_mmap": True, "low_vram": False, "tfs_z": 1}, {}),
        ({"nonsense": 1}, {}),
    ],
)
def test_options(options: dict[str, Any], sent: dict[str, Any] | None) -> None:
    """Each option becomes llama-server's parameter, or is left out where llama-server would refuse it."""
    added = {key: value for key, value in _chat_body(options=options).items() if key not in _chat_body()}
    assert added == (options if sent is None else sent)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ctx": "big"}, 'option "num_ctx" must be of type integer'),
        ({"seed": True}, 'option "seed" must be of type integer'),
        ({"temperature": "hot"}, 'option "temperature" must be of type float32'),
        ({"use_mmap": 1}, 'option "use_mmap" must be of type boolean'),
        ({"stop": [1]}, 'option "stop" must be of type array of strings'),
        ({"top_k": 1e300}, 'option "top_k" must be of type integer'),
        ([], "options must be an object"),
    ],
)
def test_option_types(options: Any, message: str) -> None:
    """An option of the wrong type is named together with the right one."""
    with pytest.raises(RequestError) as caught:
        _chat(options=options)
    assert caught.value.message == message


def test_raw_images() -> None:
    """Raw with images: one marker each, where ``[img-N]`` is or else first, and the data in that order."""
    jpeg = base64.b64encode(b"\xff\xd8\xff000").decode()
    call = request.generate(
        "m", {"prompt": "a [img-1] b [img-9]", "images": [PNG, jpeg], "raw": True}, FACTS
    ).call
    assert call is not None
    assert call.path == "/completion"
    assert call.with_media("<M>")["prompt"] == {
        "prompt_string": "<M>a <M> b [img-9]",
        "multimodal_data": [PNG, jpeg],
    }
    with pytest.raises(RequestError, match="not valid base64"):
        request.generate("m", {"prompt": "a", "images": ["http://x/y.png"], "raw": True}, FACTS)


def test_context_is_never_reloaded() -> None:
    """A num_ctx over the running context and unknown options are ignored with a warning."""
    warning = "num_ctx 32768 is ignored: the model runs with 4096"
    assert _chat(options={"num_ctx": 32768}).warnings == (warning,)
    assert _chat(options={"num_ctx": 4096}).warnings == ()
    assert "nonsense" in _chat(options={"nonsense": 1}).warnings[0]


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("json", {"type": "json_object"}),
        (SCHEMA, {"type": "json_schema", "json_schema": {"name": "schema", "schema": SCHEMA}}),
        (json.dumps(SCHEMA), {"type": "json_schema", "json_schema": {"name": "schema", "schema": SCHEMA}}),
    ],
)
def test_format(given: Any, sent: dict[str, Any]) -> None:
    """Format is json, a schema, or a text that holds a schema."""
    assert _chat_body(format=given)["response_format"] == sent


@pytest.mark.parametrize("given", ["yaml", 3, [], "[1]", True])
def test_format_refused(given: Any) -> None:
    """Any other format is refused in Ollama's words."""
    with pytest.raises(RequestError, match=r'invalid format: .*; expected "json" or a JSON schema'):
        _chat(format=given)


@pytest.mark.parametrize(
    ("think", "sent"),
    [
        (True, {"chat_template_kwargs": {"enable_thinking": True}}),
        (False, {"chat_template_kwargs": {"enable_thinking": False}}),
        ("low", {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "low"}),
        ("max", {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "high"}),
    ],
)
def test_think(think: Any, sent: dict[str, Any]) -> None:
    """Think is a real boolean for the template, and a level is an effort beside it."""
    body = _chat_body(think=think)
    assert {key: body[key] for key in body if key not in _chat_body()} == sent


def test_what_the_model_cannot_do() -> None:
    """Tools, thinking, insertion and images without the capability are 400s in Ollama's words."""
    none = frozenset({"completion"})
    image = [{"role": "user", "content": "see", "images": [PNG]}]
    asked: dict[str, dict[str, Any]] = {
        "tools": {"tools": TOOLS},
        "thinking": {"think": True},
        "images": {"messages": image},
    }
    for what, body in asked.items():
        with pytest.raises(RequestError) as caught:
            _chat(none, **body)
        assert caught.value.message == f'"m:latest" does not support {what}'
    with pytest.raises(RequestError, match='"m" does not support insert'):
        request.generate("m", {"prompt": "a", "suffix": "b"}, ModelFacts("x", 10, none))
    assert _chat(none, think=False).call is not None


@pytest.mark.parametrize("think", ["yes", 3, []])
def test_bad_think(think: Any) -> None:
    """A think value that is neither a boolean nor a level is refused."""
    with pytest.raises(RequestError, match="invalid think value"):
        _chat(think=think)


def test_logprobs() -> None:
    """Log-probabilities ask for at least one alternative; with tools they are dropped with a warning."""
    body = _chat_body(logprobs=True)
    assert (body["logprobs"], body["top_logprobs"]) == (True, 1)
    assert _chat_body(logprobs=True, top_logprobs=5)["top_logprobs"] == 5
    assert "logprobs" not in _chat_body(top_logprobs=5)
    with_tools = _chat(logprobs=True, tools=TOOLS)
    assert with_tools.call is not None
    assert "logprobs" not in with_tools.call.body
    assert with_tools.warnings
    with pytest.raises(RequestError, match="top_logprobs must be between 0 and 20"):
        _chat(top_logprobs=21)


def test_images() -> None:
    """Images become data URLs with a type told from their bytes; a data: prefix is taken off."""
    for given in (PNG, f"data:image/whatever;base64,{PNG}"):
        message = {"role": "user", "content": "see", "images": [given]}
        content = _chat_body(messages=[message])["messages"][0]["content"]
        assert content[0] == {"type": "text", "text": "see"}
        assert content[1] == {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
    wav = base64.b64encode(b"RIFF0000WAVE0000").decode()
    sound = {"role": "user", "content": "", "images": [wav]}
    content = _chat_body(messages=[sound])["messages"][0]["content"]
    assert content == [{"type": "input_audio", "input_audio": {"data": wav, "format": "wav"}}]


@pytest.mark.parametrize(
    "image", ["!!!", "", 3, base64.b64encode(b"RIFF0000WEBP0000").decode(), "http://x/y"]
)
def test_bad_images(image: Any) -> None:
    """Bad base64, WEBP and addresses are 400s."""
    with pytest.raises(RequestError):
        _chat(messages=[{"role": "user", "content": "see", "images": [image]}])


def test_tool_conversation() -> None:
    """Calls get ids and arguments as text; results find their call by id, by name, or in order."""
    messages = [
        {"role": "User", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "thinking": "hm",
            "tool_calls": [
                {"function": {"name": "weather", "arguments": {"city": "Zürich"}}},
                {"id": "x", "function": {"name": "time", "arguments": {}}},
                {"function": {"name": "weather", "arguments": '{"city":"Oslo"}'}},
            ],
        },
        {"role": "tool", "content": "10:00", "tool_name": "time"},
        {"role": "tool", "content": "sun"},
        {"role": "tool", "content": "rain", "tool_call_id": "call_2"},
    ]
    sent = _chat_body(messages=messages, tools=TOOLS)["messages"]
    assert sent[0] == {"role": "user", "content": "weather?"}
    assert sent[1]["content"] == ""
    assert sent[1]["reasoning_content"] == "hm"
    assert [call["id"] for call in sent[1]["tool_calls"]] == ["call_0", "x", "call_2"]
    assert [call["type"] for call in sent[1]["tool_calls"]] == ["function"] * 3
    texts = [call["function"]["arguments"] for call in sent[1]["tool_calls"]]
    assert texts == ['{"city": "Zürich"}', "{}", '{"city":"Oslo"}']
    assert [message["tool_call_id"] for message in sent[2:]] == ["x", "call_0", "call_2"]


@pytest.mark.parametrize(
    "messages",
    ["hello", [3], [{"content": "x"}], [{"role": "user", "content": 3}],
     [{"role": "user", "content": "", "images": 3}], [{"role": "assistant", "tool_calls": [{}]}]],
)  # fmt: skip
def test_bad_messages(messages: Any) -> None:
    """Malformed messages are RequestErrors, never anything else."""
    with pytest.raises(RequestError):
        _chat(messages=messages)


def test_generate_is_chat() -> None:
    """A plain prompt with its system text goes the way of chat."""
    path, body = _generate_call(prompt="hello", system="be kind", options={"temperature": 0}, context=[1, 2])
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "system", "content": "be kind"}, *HELLO]
    assert body["temperature"] == 0
    translation = request.generate("m", {"prompt": "x", "template": "{{ .Prompt }}"}, FACTS)
    assert "template" in translation.warnings[0]


def test_raw_and_suffix() -> None:
    """Raw goes to /completion verbatim, a suffix to /infill; raw takes no system text or template."""
    path, body = _generate_call(prompt="<fim>x", raw=True, format=SCHEMA, logprobs=True, top_logprobs=3)
    assert path == "/completion"
    assert (body["prompt"], body["json_schema"], body["n_probs"]) == ("<fim>x", SCHEMA, 3)
    path, body = _generate_call(prompt="def f(", suffix="return", options={"num_predict": 3})
    assert path == "/infill"
    assert (body["input_prefix"], body["input_suffix"], body["n_predict"]) == ("def f(", "return", 3)
    for more in ({"system": "s"}, {"template": "t"}, {"context": [1]}):
        with pytest.raises(RequestError, match="raw mode does not support template, system, or context"):
            _generate_call(prompt="x", raw=True, **more)


@pytest.mark.parametrize("body", [{}, {"prompt": ""}, {"prompt": "", "system": "s"}, {"prompt": None}])
def test_load_and_unload(body: dict[str, Any]) -> None:
    """No prompt loads the model; with keep_alive 0 it unloads it; chat without messages does the same."""
    assert request.generate("m", body, FACTS).call is None
    assert not request.generate("m", body, FACTS).unloads
    assert request.generate("m", {**body, "keep_alive": 0}, FACTS).unloads
    assert _chat(messages=[], keep_alive="0s").unloads
    assert _chat(messages=None).call is None
    assert not _chat(keep_alive=0).unloads


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, None), (0, 0.0), (300, 300.0), (-1, -1.0), (1.5, 1.5), ("5m", 300.0), ("1h30m", 5400.0),
     ("300ms", 0.3), ("-1m", -60.0), ("1.5h", 5400.0), ("0", 0.0), ("-1", -1.0), ("300", 300.0),
     ("10us", 1e-5)],
)  # fmt: skip
def test_keep_alive(value: Any, seconds: float | None) -> None:
    """Numbers are seconds, texts are Go durations, bare numbers as text are taken too."""
    assert request.keep_alive(value) == (seconds if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize("value", ["soon", "5 m", "m", "", True, [], "1h30"])
def test_bad_keep_alive(value: Any) -> None:
    """Anything else is a RequestError."""
    with pytest.raises(RequestError):
        request.keep_alive(value)


@pytest.mark.parametrize(
    "name",
    ["planted-moe", "planted-moe:latest", "Planted-MoE", "gpt-4o", "GPT-4o:latest", "Planted-MoE-Q4_K_M",
     "registry.ollama.ai/library/planted-moe:latest", "library/planted-moe"],
)  # fmt: skip
def test_names(name: str) -> None:
    """Alias, file stem and configured aliases answer, with :latest or without, in any case, prefix or not."""
    assert models.is_served(card(), name)


@pytest.mark.parametrize("name", ["other", "planted-moe:7b", "planted", ""])
def test_other_names(name: str) -> None:
    """Other names, and other tags, do not."""
    assert not models.is_served(card(), name)


def test_capabilities_of_a_header() -> None:
    """Capabilities follow from the chat template and the FIM tokens."""
    assert models.capabilities_of(header()) == ("completion", "tools", "insert", "thinking")
    assert models.capabilities_of(header(chat_template="", has_fim=False)) == ("completion",)
    flags = ("--mmproj=eye.gguf", "--embeddings")
    assert models.capabilities_of(header(chat_template="", has_fim=False), flags) == (
        "completion",
        "vision",
        "embedding",
    )


@pytest.mark.parametrize(
    ("count", "text"), [(30_532_122_624, "30.5B"), (812_000_000, "812M"), (4_200_000, "4.2M"), (999, "999")]
)
def test_parameter_size(count: int, text: str) -> None:
    """Parameters are written as Ollama writes them."""
    assert models.parameter_size(count) == text
