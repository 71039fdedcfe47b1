"""Owns what the operator changes in every request that generates text. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# What Ollama samples with unless told otherwise, where llama-server or the model would choose otherwise.
_OLLAMA_DEFAULTS: Mapping[str, object] = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.0,
    "typical_p": 1.0,
}


@dataclass(frozen=True)
class ParameterFilter:
    """First ``strip`` is taken out, then ``set`` is put in, over what the client gave.

    The names are those of the body that llama-server gets. ``ollama_defaults``: requests that came in
    Ollama's form get its defaults first, under what the client gave.
    """

    strip: tuple[str, ...] = ()
    set: Mapping[str, object] = field(default_factory=dict)
    ollama_defaults: bool = False

    def applied(self, body: Mapping[str, object], *, from_ollama: bool = False) -> Mapping[str, object]:
        """The body to send; ``body`` itself when nothing of it changes."""
        defaults = _OLLAMA_DEFAULTS if from_ollama and self.ollama_defaults else {}
        if not defaults and not self.set and not any(name in body for name in self.strip):
            return body
        kept = {name: value for name, value in {**defaults, **body}.items() if name not in self.strip}
        return {**kept, **self.set}
