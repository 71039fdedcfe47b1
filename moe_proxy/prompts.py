"""Owns which text of a request body is classified; it never classifies, and never says that a body is wrong.

Pure: bytes in, text out. A body that is not understood has no text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

# A classifier needs the drift of a text, not all of it; this also bounds its time on the request path.
TEXT_CHARACTERS = 8192
_TURN_CHARACTERS = 4096
_LEAST_TURN_CHARACTERS = 256
_INSTRUCTION_ROLES = frozenset({"system", "developer"})


def text_of(path: str, body: bytes) -> str | None:
    """The text to classify in ``body`` sent to ``path``, at most TEXT_CHARACTERS characters.

    The last user turn stands first, then earlier user turns from new to old, then system text. None when
    there is no such text or the body is not understood.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return text_in(path, value)


def text_in(path: str, value: object) -> str | None:
    """As ``text_of``, of a body that is parsed already."""
    if not isinstance(value, Mapping):
        return None
    if path == "/v1/responses":
        turns = _responses_turns(value)
    elif "messages" in value:
        turns = _message_turns(value)
    elif path == "/infill":
        turns = iter((_text(value.get("input_prefix")), _text(value.get("input_suffix"))))
    else:
        turns = iter((_text(value.get("prompt")), _text(value.get("suffix")), _text(value.get("system"))))
    return _join(turns)


def _message_turns(value: Mapping[str, object]) -> Iterator[str]:
    """Chat bodies: OpenAI, Ollama, and Anthropic with its system text beside the messages."""
    messages = value.get("messages")
    listed = messages if isinstance(messages, list) else []
    yield from _turns(listed)
    yield _text(value.get("system"))


def _responses_turns(value: Mapping[str, object]) -> Iterator[str]:
    """``/v1/responses``: ``input`` is a text or a list of items."""
    given = value.get("input")
    if isinstance(given, list):
        yield from _turns(given)
    else:
        yield _text(given)
    yield _text(value.get("instructions"))


def _turns(messages: list[object]) -> Iterator[str]:
    instructions: list[str] = []
    for message in reversed(messages):
        if not isinstance(message, Mapping):
            continue
        role = message.get("role")
        if role in ("user", "tool"):
            yield _text(message.get("content"))
        elif isinstance(role, str) and role.lower() in _INSTRUCTION_ROLES:
            instructions.append(_text(message.get("content")))
    yield from reversed(instructions)


def _text(content: object) -> str:
    """The text of a content field: a string, a part with ``text``, or a list of those; images have none."""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        text = content.get("text", content.get("prompt_string"))
        if text is None and content.get("type") == "tool_result":
            inner = content.get("content")
            return inner if isinstance(inner, str) else _text(inner) if isinstance(inner, list) else ""
        return text if isinstance(text, str) else ""
    if isinstance(content, list):
        return "\n".join(filter(None, (_text(part) for part in content if not isinstance(part, list))))
    return ""


def _join(turns: Iterator[str]) -> str | None:
    """Turns joined by line ends until the room is used up; a long turn keeps its two ends."""
    parts: list[str] = []
    room = TEXT_CHARACTERS
    # What came before says less about what is asked now: each turn may fill half as much as the one after it.
    longest = _TURN_CHARACTERS
    for turn in turns:
        part = turn.strip()
        if not part:
            continue
        if len(part) > longest:
            half = longest // 2
            part = f"{part[:half]}\n{part[1 - half :]}"
        if len(part) > room:
            part = part[:room]
        parts.append(part)
        longest = max(longest // 2, _LEAST_TURN_CHARACTERS)
        room -= len(part) + 1
        if room <= 0:
            break
    return "\n".join(parts) or None
