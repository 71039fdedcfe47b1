"""Owns the way from an Ollama request body to a call of llama-server. Pure: records in, records out.

What llama-server cannot do for one request (reload with another context, use another template) is ignored
with a word about it; what is simply wrong is a RequestError in Ollama's own words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from moe_proxy.durations import parse_seconds
from moe_proxy.errors import RequestError
from moe_proxy.proxy.ollama.messages import bare_media, engine_messages, user_message
from moe_proxy.proxy.ollama.options import Json, engine_options

_IMAGE_TAG = re.compile(r"\[img-(\d{1,4})\]")
_THINK_LEVELS = ("low", "medium", "high", "max")


@dataclass(frozen=True)
class ModelFacts:
    """What the translation must know of the model. ``name`` is the one llama-server knows."""

    name: str
    context_length: int
    capabilities: frozenset[str]


@dataclass(frozen=True)
class EngineCall:
    """One POST to llama-server. ``media``: images for its ``prompt``, in base64; see ``with_media``."""

    path: str
    body: Json
    media: tuple[str, ...] = ()

    def with_media(self, marker: str) -> Json:
        """The body with its media; ``marker`` is what stands for one of them in llama-server's prompts.

        ``[img-0]`` in the prompt says where the first one goes; those that the prompt does not place come
        before it.
        """
        prompt = str(self.body["prompt"])
        order: list[int] = []

        def placed(match: re.Match[str]) -> str:
            number = int(match[1])
            if number in order or number >= len(self.media):
                return match[0]
            order.append(number)
            return marker

        text = _IMAGE_TAG.sub(placed, prompt)
        first = [number for number in range(len(self.media)) if number not in order]
        data = [self.media[number] for number in (*first, *order)]
        prompt_value = {"prompt_string": marker * len(first) + text, "multimodal_data": data}
        return {**self.body, "prompt": prompt_value}


@dataclass(frozen=True)
class Translation:
    """What an Ollama request comes to.

    ``call`` is None when nothing is to be generated: the client loads or unloads the model. ``keep_alive_s``
    is None when absent, negative for ever. ``warnings`` say what was ignored.
    """

    call: EngineCall | None
    stream: bool
    keep_alive_s: float | None = None
    warnings: tuple[str, ...] = field(default=())

    @property
    def unloads(self) -> bool:
        """Whether the client wants the model out of memory, and nothing else."""
        return self.call is None and self.keep_alive_s == 0


def chat(model: str, body: Json, facts: ModelFacts) -> Translation:
    """``POST /api/chat``; ``model`` is the requested name, for messages. Raises RequestError."""
    stream, keep_alive_s = flag(body, "stream", default=True), keep_alive(body.get("keep_alive"))
    messages = body.get("messages")
    if not isinstance(messages, list | None):
        raise RequestError("messages must be an array")
    if not messages:
        return Translation(None, stream, keep_alive_s)
    warnings: list[str] = []
    tools = body.get("tools") or None
    if tools is not None and not isinstance(tools, list):
        raise RequestError("tools must be an array")
    if tools is not None and "tools" not in facts.capabilities:
        raise _unsupported(model, "tools")
    call = _chat_call(model, body, facts, engine_messages(messages), warnings)
    if tools is not None:
        call["tools"] = tools
        if call.pop("logprobs", None):
            # llama-server refuses the two together in a stream.
            call.pop("top_logprobs", None)
            warnings.append("logprobs are not available together with tools")
    if "images" in _contents(call["messages"]) and "vision" not in facts.capabilities:
        raise _unsupported(model, "images")
    return Translation(EngineCall("/v1/chat/completions", call), stream, keep_alive_s, tuple(warnings))


def generate(model: str, body: Json, facts: ModelFacts) -> Translation:
    """``POST /api/generate``. Raises RequestError."""
    stream, keep_alive_s = flag(body, "stream", default=True), keep_alive(body.get("keep_alive"))
    prompt, suffix, system = (_text(body, name) for name in ("prompt", "suffix", "system"))
    images = body.get("images") or []
    if not isinstance(images, list):
        raise RequestError("images must be an array of base64 strings")
    raw = flag(body, "raw", default=False)
    if not prompt and not suffix and not images:
        return Translation(None, stream, keep_alive_s)
    if images and "vision" not in facts.capabilities:
        raise _unsupported(model, "images")
    warnings: list[str] = []
    if suffix:
        if "insert" not in facts.capabilities:
            raise _unsupported(model, "insert")
        call = _plain_call(body, facts, warnings)
        call |= {"input_prefix": prompt, "input_suffix": suffix}
        return Translation(EngineCall("/infill", call), stream, keep_alive_s, tuple(warnings))
    if raw:
        if system or body.get("template") or body.get("context"):
            raise RequestError("raw mode does not support template, system, or context")
        call = _plain_call(body, facts, warnings)
        call["prompt"] = prompt
        media = tuple(bare_media(image) for image in images)
        return Translation(EngineCall("/completion", call, media), stream, keep_alive_s, tuple(warnings))
    if body.get("template"):
        warnings.append("template is ignored: the model's own is used")
    messages: list[object] = [{"role": "system", "content": system}] if system else []
    messages.append(user_message(prompt, images))
    call = _chat_call(model, body, facts, messages, warnings)
    return Translation(EngineCall("/v1/chat/completions", call), stream, keep_alive_s, tuple(warnings))


def keep_alive(value: object) -> float | None:
    """Seconds; None when absent; negative means for ever. Go's durations, and bare numbers also as text."""
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        # What is longer than a number of 64 bits can say is for ever, or was for ever ago.
        return float(max(-(2**63), min(value, 2**63)))
    if isinstance(value, str):
        seconds = parse_seconds(value)
        if seconds is not None:
            return seconds
    raise RequestError(f"keep_alive {value!r} is no duration", 'give seconds, or a text such as "5m"')


def _chat_call(
    model: str, body: Json, facts: ModelFacts, messages: list[object], warnings: list[str]
) -> dict[str, object]:
    """The body for ``/v1/chat/completions``. Always a stream: it can be cancelled, and kept alive."""
    call: dict[str, object] = {
        "model": facts.name,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_prompt": True,
    }
    call |= engine_options(body.get("options"), facts.context_length, warnings)
    schema = _format(body.get("format"))
    if schema is not None:
        call["response_format"] = (
            {"type": "json_schema", "json_schema": {"name": "schema", "schema": schema}}
            if schema
            else {"type": "json_object"}
        )
    call |= _thinking(model, body.get("think"), facts)
    call |= _logprobs(body)
    return call


def _plain_call(body: Json, facts: ModelFacts, warnings: list[str]) -> dict[str, object]:
    """What ``/completion`` and ``/infill`` have in common."""
    call: dict[str, object] = {"model": facts.name, "stream": True, "cache_prompt": True}
    call |= engine_options(body.get("options"), facts.context_length, warnings)
    schema = _format(body.get("format"))
    if schema is not None:
        call["json_schema"] = schema or {"type": "object"}
    wanted = _logprobs(body)
    if wanted:
        call["n_probs"] = wanted["top_logprobs"]
    return call


def _format(value: object) -> Json | None:
    """A JSON schema; an empty one stands for any JSON; None for no format."""
    if value is None or value == "":
        return None
    if value == "json":
        return {}
    schema = value
    if isinstance(value, str):
        try:
            schema = json.loads(value)
        except (ValueError, RecursionError):
            schema = None
    if isinstance(schema, Mapping) and schema:
        return schema
    raise RequestError(f'invalid format: {value!r}; expected "json" or a JSON schema')


def _thinking(model: str, think: object, facts: ModelFacts) -> dict[str, object]:
    """llama-server takes a real boolean only, and the effort beside it."""
    if think is None:
        return {}
    if not isinstance(think, bool) and think not in _THINK_LEVELS:
        raise RequestError(
            f'invalid think value: {think!r} (must be "high", "medium", "low", "max", true, or false)'
        )
    if think and "thinking" not in facts.capabilities:
        raise _unsupported(model, "thinking")
    call: dict[str, object] = {"chat_template_kwargs": {"enable_thinking": think is not False}}
    if isinstance(think, str):
        call["reasoning_effort"] = "high" if think == "max" else think
    return call


def _logprobs(body: Json) -> dict[str, object]:
    top = body.get("top_logprobs")
    if top is not None and (isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= 20):
        raise RequestError("top_logprobs must be between 0 and 20")
    if not flag(body, "logprobs", default=False):
        return {}
    return {"logprobs": True, "top_logprobs": max(top or 0, 1)}


def _contents(messages: object) -> frozenset[str]:
    """``images`` when any message has a part that is one."""
    assert isinstance(messages, list)
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and any(part.get("type") == "image_url" for part in content):
            return frozenset({"images"})
    return frozenset()


def flag(body: Json, name: str, *, default: bool) -> bool:
    """A boolean of ``body``; null is as if absent. Raises RequestError."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false")
    return value


def _text(body: Json, name: str) -> str:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{name} must be a string")
    return value or ""


def _unsupported(model: str, what: str) -> RequestError:
    return RequestError(f'"{model}" does not support {what}')
