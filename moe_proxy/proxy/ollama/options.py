"""Owns the way from Ollama's ``options`` to llama-server's sampling parameters. Pure.

Only what the client gave is sent on: for the rest, the model's own defaults hold.
"""

from __future__ import annotations

from collections.abc import Mapping

from moe_proxy.errors import RequestError

Json = Mapping[str, object]

_INTEGERS = {
    "seed": "seed",
    "num_predict": "n_predict",
    "num_keep": "n_keep",
    "top_k": "top_k",
    "repeat_last_n": "repeat_last_n",
    "mirostat": "mirostat",
}
_NUMBERS = (
    "temperature", "top_p", "min_p", "typical_p", "repeat_penalty", "presence_penalty", "frequency_penalty",
    "mirostat_tau", "mirostat_eta",
)  # fmt: skip
# Decided when the model is loaded; another value never reloads it.
_LOAD_TIME_INTEGERS = ("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "draft_num_predict")
_LOAD_TIME_FLAGS = ("use_mmap", "use_mlock", "low_vram", "f16_kv", "vocab_only", "numa")
# Known, and gone from llama.cpp.
_DROPPED = frozenset({"tfs_z", "penalize_newline"})


def engine_options(options: object, context_length: int, warnings: list[str]) -> dict[str, object]:
    """llama-server's parameters for ``options``. Raises RequestError naming the option and its right type."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise RequestError("options must be an object")
    result: dict[str, object] = {}
    for name, value in options.items():
        if value is None:
            continue
        if name in _INTEGERS:
            number = _integer(name, value)
            kept = _kept_integer(name, number, context_length)
            if kept is not None:
                result[_INTEGERS[name]] = kept
        elif name in _NUMBERS:
            result[name] = _number(name, value)
        elif name == "stop":
            result["stop"] = _stops(value)
        elif name in _LOAD_TIME_INTEGERS:
            number = _integer(name, value)
            if name == "num_ctx" and number > context_length:
                warnings.append(f"num_ctx {number} is ignored: the model runs with {context_length}")
        elif name in _LOAD_TIME_FLAGS:
            if not isinstance(value, bool):
                raise _mistyped(name, "boolean")
        elif name not in _DROPPED:
            warnings.append(f"option {name!r} is unknown and ignored")
    return result


def _kept_integer(name: str, number: int, context_length: int) -> int | None:
    """The value llama-server takes for what Ollama means; None: leave it out."""
    if name == "num_predict" and number < 0:
        return None
    if name == "seed" and number < 0:
        return None
    if name == "num_keep":
        return max(number, -1)
    if name == "repeat_last_n" and number < 0:
        return context_length
    return number


def _integer(name: str, value: object) -> int:
    # As in Ollama, where every JSON number is a float first.
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 2**53:
        raise _mistyped(name, "integer")
    return int(value)


def _number(name: str, value: object) -> float | int:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _mistyped(name, "float32")
    return value


def _stops(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _mistyped("stop", "array of strings")
    return stops


def _mistyped(name: str, kind: str) -> RequestError:
    return RequestError(f'option "{name}" must be of type {kind}')
