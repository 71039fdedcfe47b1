"""Owns the tool that tests let models call, and how a model that knows none is brought to call it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Bergen"]}},
    "required": ["city"],
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": PARAMETERS},
}
# The planted model only lists words, and its own template knows no tools. This one takes one of the words for
# the beginning of a call; after that the engine's grammar leads.
TEMPLATE_ARGS = ("--chat-template-file", str(Path(__file__).with_name("tools.jinja")))
# What makes each request with tools call one: Ollama's API has no word for it, so the operator says it.
MUST_CALL = '{"tool_choice": "required"}'
# A call is whole after at most so many tokens; the model goes on calling, and is cut somewhere.
CALL_TOKENS = 80
