"""The answers of the fake llama-server in llama-server's shapes: chunks, whole answers, usage and timings."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from typing import Any

from fake_llama_state import EXPERT_BYTES, EXPERTS, EXPERTS_USED, LAYERS, Fake


def tokens_of(text: str) -> list[str]:
    """Cut at spaces, the space leading the next token, as vocabularies do."""
    words = text.split(" ")
    return [word if index == 0 else " " + word for index, word in enumerate(words)]


def prompt_text(body: dict[str, Any]) -> str:
    """Everything of the prompt that is text, for the token count."""
    if "messages" in body:
        return " ".join(json.dumps(message.get("content")) for message in body["messages"])
    return json.dumps(body.get("prompt", body.get("input", body.get("content", ""))))


def timings(prompt_count: int, reply_count: int) -> dict[str, float]:
    """The timings object; the figures are made up, their relations hold."""
    return {
        "cache_n": 0,
        "prompt_n": prompt_count,
        "prompt_ms": 10.0 * prompt_count,
        "prompt_per_token_ms": 10.0,
        "prompt_per_second": 100.0,
        "predicted_n": reply_count,
        "predicted_ms": 20.0 * reply_count,
        "predicted_per_token_ms": 20.0,
        "predicted_per_second": 50.0,
    }


@dataclass
class Generation:
    """What will be answered to one request, decided before the first byte."""

    body: dict[str, Any]
    pieces: list[str]
    reasoning: list[str]
    tool: str
    prompt_count: int
    finish: str
    identity: str

    @property
    def count(self) -> int:
        """Tokens generated."""
        return len(self.pieces) + len(self.reasoning)

    def usage(self) -> dict[str, object]:
        """The usage object."""
        return {
            "completion_tokens": self.count,
            "prompt_tokens": self.prompt_count,
            "total_tokens": self.count + self.prompt_count,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


def generation_of(fake: Fake, body: dict[str, Any]) -> Generation:
    """Decide the answer to one request."""
    fake.serial += 1
    pieces = tokens_of(fake.switches.reply) if fake.switches.reply else []
    reasoning = tokens_of(fake.switches.reasoning) if fake.switches.reasoning else []
    tool = ""
    if fake.switches.tool_call and body.get("tools"):
        tool, pieces = body["tools"][0]["function"]["name"], []
    limit = body.get("max_tokens", body.get("max_completion_tokens", body.get("n_predict", -1)))
    finish = "tool_calls" if tool else "stop"
    if isinstance(limit, int) and 0 <= limit < len(pieces):
        pieces, finish = pieces[:limit], "length"
    count = max(1, len(prompt_text(body).split()))
    return Generation(body, pieces, reasoning, tool, count, finish, f"chatcmpl-fake{fake.serial:06d}")


def chunk(fake: Fake, made: Generation, choices: list[object], **more: object) -> dict[str, object]:
    """One ``chat.completion.chunk``."""
    return {
        "choices": choices,
        "created": int(time.time()),
        "id": made.identity,
        "model": fake.alias,
        "system_fingerprint": "fake-0",
        "object": "chat.completion.chunk",
        **more,
    }


def chat_events(fake: Fake, made: Generation) -> list[dict[str, object]]:
    """Role, reasoning, content or a tool call in three parts, finish; usage and timings at the end."""
    deltas: list[dict[str, object]] = [{"role": "assistant", "content": None}]
    deltas += [{"reasoning_content": piece} for piece in made.reasoning]
    deltas += [{"content": piece} for piece in made.pieces]
    if made.tool:
        head = {
            "index": 0,
            "id": "call0",
            "type": "function",
            "function": {"name": made.tool, "arguments": ""},
        }
        deltas.append({"tool_calls": [head]})
        deltas += [
            {"tool_calls": [{"index": 0, "function": {"arguments": part}}]}
            for part in ('{"city":', '"Oslo"}')
        ]
    events = [chunk(fake, made, [{"finish_reason": None, "index": 0, "delta": delta}]) for delta in deltas]
    events.append(chunk(fake, made, [{"finish_reason": made.finish, "index": 0, "delta": {}}]))
    if (made.body.get("stream_options") or {}).get("include_usage"):
        events.append(chunk(fake, made, [], usage=made.usage()))
    events[-1]["timings"] = timings(made.prompt_count, made.count)
    return events


def text_event(fake: Fake, made: Generation, text: str, finish: str | None) -> dict[str, object]:
    """One event of ``/v1/completions``; the last one carries usage and timings."""
    event: dict[str, object] = {
        "choices": [{"text": text, "index": 0, "logprobs": None, "finish_reason": finish}],
        "created": int(time.time()),
        "model": fake.alias,
        "system_fingerprint": "fake-0",
        "object": "text_completion",
        "id": made.identity,
    }
    if finish is not None:
        event["usage"] = made.usage()
        event["timings"] = timings(made.prompt_count, made.count)
    return event


def native_event(fake: Fake, made: Generation, text: str, last: bool) -> dict[str, object]:
    """One event of ``/completion``."""
    event: dict[str, object] = {
        "index": 0,
        "content": text,
        "tokens": [],
        "id_slot": 0,
        "stop": last,
        "tokens_predicted": made.count,
        "tokens_evaluated": made.prompt_count,
    }
    if last:
        event |= {
            "model": fake.alias,
            "generation_settings": {},
            "prompt": prompt_text(made.body),
            "has_new_line": False,
            "truncated": False,
            "stop_type": "limit" if made.finish == "length" else "eos",
            "stopping_word": "",
            "tokens_cached": made.prompt_count + made.count,
            "timings": timings(made.prompt_count, made.count),
        }
    return event


def events_of(fake: Fake, made: Generation, family: str) -> tuple[list[dict[str, object]], bool]:
    """All events of a stream, and whether ``[DONE]`` follows them."""
    if family == "chat":
        return chat_events(fake, made), True
    if family == "text":
        events = [text_event(fake, made, piece, None) for piece in made.pieces]
        return [*events, text_event(fake, made, "", made.finish)], True
    events = [native_event(fake, made, piece, False) for piece in made.pieces]
    return [*events, native_event(fake, made, "", True)], False


def whole_of(fake: Fake, made: Generation, family: str) -> dict[str, object]:
    """The answer that is not streamed."""
    text = "".join(made.pieces)
    if family == "text":
        return text_event(fake, made, text, made.finish)
    if family == "native":
        return native_event(fake, made, text, True)
    message: dict[str, object] = {"role": "assistant", "content": text}
    if made.reasoning:
        message["reasoning_content"] = "".join(made.reasoning)
    if made.tool:
        function = {"name": made.tool, "arguments": '{"city":"Oslo"}'}
        message |= {
            "content": None,
            "tool_calls": [{"type": "function", "function": function, "id": "call0"}],
        }
    choice = {"finish_reason": made.finish, "index": 0, "message": message}
    whole = chunk(fake, made, [choice], usage=made.usage(), timings=timings(made.prompt_count, made.count))
    return {**whole, "object": "chat.completion"}


def route(fake: Fake, made: Generation, request_id: str) -> None:
    """Pretend routing: equal prompts pick equal experts, since they follow from the prompt's bytes."""
    tokens = made.prompt_count + made.count
    seed = hashlib.sha256(prompt_text(made.body).encode()).digest()
    counts = fake.usage.setdefault(request_id, {layer: [0] * EXPERTS for layer in range(LAYERS)})
    fake.usage_tokens[request_id] = fake.usage_tokens.get(request_id, 0) + tokens
    for layer in range(LAYERS):
        for used in range(EXPERTS_USED):
            expert = (seed[layer] + used) % EXPERTS
            counts[layer][expert] += tokens
            hit = expert in fake.resident[layer]
            fake.counters["hits" if hit else "misses"] += tokens
            fake.counters["hit_bytes" if hit else "miss_bytes"] += tokens * EXPERT_BYTES
    fake.counters["tokens"] += tokens
    fake.counters["ubatches"] += 1 + made.count
    fake.counters["picks"] += tokens * LAYERS * EXPERTS_USED
