"""Owns the way from Ollama's messages to OpenAI's: roles, images, thinking, tool calls and results. Pure."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping

from moe_proxy.errors import RequestError
from moe_proxy.proxy.security import check_media

Json = Mapping[str, object]

_IMAGE_MAGIC = (
    (b"\x89PNG", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
)


def engine_messages(messages: list[object]) -> list[object]:
    """All messages in OpenAI's form. Raises RequestError."""
    calls = _ToolCalls()
    return [_message(index, message, calls) for index, message in enumerate(messages)]


def user_message(prompt: str, images: list[object]) -> Json:
    """One user turn with its images."""
    return {"role": "user", "content": _with_images(prompt, images)}


def bare_media(image: object) -> str:
    """The clean base64 of an image or a sound. Raises RequestError."""
    return _media(image)[1]


class _ToolCalls:
    """Ids for tool calls that have none, the same ids for the results that follow."""

    def __init__(self) -> None:
        self._count = 0
        self._open: list[tuple[str, str]] = []

    def asked(self, call: object) -> Json:
        """One call of an assistant's message; arguments become the text OpenAI's form wants."""
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping):
            raise RequestError("a tool call needs a function")
        name, arguments = function.get("name"), function.get("arguments")
        if not isinstance(name, str):
            raise RequestError("a tool call's function needs a name")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
        identity = call.get("id")
        if not isinstance(identity, str) or not identity:
            identity = f"call_{self._count}"
        self._count += 1
        self._open.append((identity, name))
        return {"id": identity, "type": "function", "function": {"name": name, "arguments": text}}

    def answered(self, message: Json) -> dict[str, object]:
        """The ``tool_call_id`` and ``name`` of a tool message: by id, else by name, else in order."""
        identity = message.get("tool_call_id")
        name = message.get("tool_name") or message.get("name")
        for index, (open_id, open_name) in enumerate(self._open):
            if open_id == identity or (not identity and name in (None, "", open_name)):
                del self._open[index]
                return {"tool_call_id": open_id, "name": open_name}
        found: dict[str, object] = {}
        if isinstance(identity, str) and identity:
            found["tool_call_id"] = identity
        if isinstance(name, str) and name:
            found["name"] = name
        return found


def _message(index: int, message: object, calls: _ToolCalls) -> Json:
    if not isinstance(message, Mapping):
        raise RequestError(f"messages[{index}] must be an object")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"messages[{index}] needs a role")
    images = message.get("images") or []
    if not isinstance(images, list):
        raise RequestError(f"messages[{index}].images must be an array of base64 strings")
    result: dict[str, object] = {
        "role": role.lower(),
        "content": _content(index, message.get("content"), images),
    }
    thinking = message.get("thinking")
    if isinstance(thinking, str) and thinking:
        # Templates of models that call tools need it to go on where they stopped.
        result["reasoning_content"] = thinking
    asked = message.get("tool_calls")
    if isinstance(asked, list) and asked:
        result["tool_calls"] = [calls.asked(call) for call in asked]
    if result["role"] == "tool":
        result |= calls.answered(message)
    return result


def _content(index: int, content: object, images: list[object]) -> object:
    if content is None:
        content = ""
    if isinstance(content, str):
        return _with_images(content, images)
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        check_media({"messages": content})
        return [*content, *(_part(image) for image in images)]
    raise RequestError(f"messages[{index}].content must be a string")


def _with_images(text: str, images: list[object]) -> object:
    if not images:
        return text
    parts: list[object] = [{"type": "text", "text": text}] if text else []
    return parts + [_part(image) for image in images]


def _part(image: object) -> Json:
    kind, data = _media(image)
    if kind.startswith("audio/"):
        return {"type": "input_audio", "input_audio": {"data": data, "format": kind.removeprefix("audio/")}}
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


def _media(image: object) -> tuple[str, str]:
    """MIME type, told from the first bytes, and clean base64."""
    if not isinstance(image, str):
        raise RequestError("an image must be a base64 string")
    text = image.partition(",")[2] if image.startswith("data:") else image
    text = "".join(text.split())
    try:
        head = base64.b64decode(text, validate=True)[:16]
    except (binascii.Error, ValueError) as error:
        raise RequestError("an image is not valid base64") from error
    if not head:
        raise RequestError("an image is empty")
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        raise RequestError("WEBP images are not supported", "send PNG or JPEG")
    if head[:4] == b"RIFF" and head[8:12] == b"WAVE":
        return "audio/wav", text
    if head[:3] == b"ID3" or head[:2] in (b"\xff\xfb", b"\xff\xf3", b"\xff\xf2"):
        return "audio/mp3", text
    return next((kind for magic, kind in _IMAGE_MAGIC if head.startswith(magic)), "image/jpeg"), text
