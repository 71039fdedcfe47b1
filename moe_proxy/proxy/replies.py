"""Owns the shape of an error in each family of APIs, llama-server's too; it never decides what is one."""

from __future__ import annotations

import json
from enum import Enum

from aiohttp import web

from moe_proxy.errors import (
    BusyError,
    EngineError,
    MoeProxyError,
    NotRunningError,
    UnauthorizedError,
)

OLLAMA_BUSY = "server busy, please try again.  maximum pending requests exceeded"


class Family(Enum):
    """Whose error shape a route has."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    OLLAMA = "ollama"


def family_of(path: str) -> Family:
    """The family of a normal path; what belongs to none is answered as OpenAI's."""
    if path == "/" or path == "/api" or path.startswith("/api/"):
        return Family.OLLAMA
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return Family.ANTHROPIC
    return Family.OPENAI


# Made once: with arguments of its own, json.dumps makes one for every call.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def dump(value: object) -> bytes:
    """Compact JSON in UTF-8. Half a surrogate pair, which UTF-8 cannot hold, becomes a question mark."""
    return _ENCODER.encode(value).encode("utf-8", "replace")


def status_of(family: Family, error: MoeProxyError) -> int:
    """The HTTP status of ``error``."""
    return 503 if family is Family.OLLAMA and isinstance(error, BusyError) else error.http_status


def error_value(family: Family, error: MoeProxyError) -> dict[str, object]:
    """The JSON of ``error``: a string for Ollama's clients, an object with a type for the others."""
    message = str(error)
    if family is Family.OLLAMA:
        return {"error": OLLAMA_BUSY if isinstance(error, BusyError) else message}
    if family is Family.ANTHROPIC:
        return {"type": "error", "error": {"type": error.openai_type, "message": message}}
    code = status_of(family, error)
    return {"error": {"code": code, "message": message, "type": error.openai_type, "param": None}}


def refusal(status: int, body: bytes) -> EngineError:
    """llama-server's error answer as an error of ours, with its own status, type and message."""
    message, kind = "", ""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    error = value.get("error") if isinstance(value, dict) else None
    if isinstance(error, dict):
        message, kind = str(error.get("message") or ""), str(error.get("type") or "")
    elif isinstance(error, str):
        message = error
    refused = EngineError(message or f"llama-server answered with status {status} and no reason")
    refused.http_status = status if status >= 400 else 502
    refused.openai_type = kind or "server_error"
    return refused


def retry_after_s(error: MoeProxyError) -> int | None:
    """Seconds for ``Retry-After``, for errors that pass by themselves."""
    if isinstance(error, BusyError):
        return error.retry_after_s
    return 1 if isinstance(error, NotRunningError) else None


def json_reply(value: object, status: int = 200) -> web.Response:
    """A reply in JSON."""
    return web.Response(body=dump(value), status=status, content_type="application/json", charset="utf-8")


def error_reply(family: Family, error: MoeProxyError) -> web.Response:
    """The whole reply for ``error``."""
    reply = json_reply(error_value(family, error), status_of(family, error))
    seconds = retry_after_s(error)
    if seconds is not None:
        reply.headers["Retry-After"] = str(seconds)
    if isinstance(error, UnauthorizedError):
        reply.headers["WWW-Authenticate"] = "Bearer"
    return reply
