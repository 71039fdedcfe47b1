"""Owns what is said of the served model: its names, and the answers of the information routes.

Pure: everything comes from the model card, so these answers are the same in every state of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone

from moe_proxy.errors import ModelNotFoundError, RequestError
from moe_proxy.model.gguf_header import GgufHeader
from moe_proxy.proxy.context import ModelCard, ProxyContext

_LIBRARY_PREFIXES = ("registry.ollama.ai/library/", "library/")
_FOREVER = timedelta(days=36500)
# What a model can do beyond its header, by the flags of llama-server that let it.
_FLAGGED = {
    "vision": frozenset({"--mmproj", "-mm"}),
    "embedding": frozenset({"--embedding", "--embeddings"}),
}
_HEAD_KEYS = ("general.architecture", "general.parameter_count")


def tagged(name: str) -> str:
    """``name`` as it is compared: without the library's prefix, with a tag, in lower case."""
    bare = name.strip().lower()
    for prefix in _LIBRARY_PREFIXES:
        bare = bare.removeprefix(prefix)
    return bare if ":" in bare.rpartition("/")[2] else f"{bare}:latest"


def listed_name(card: ModelCard) -> str:
    """The name in lists, with its tag: clients compare with and without it."""
    return card.name if ":" in card.name.rpartition("/")[2] else f"{card.name}:latest"


def upstream_name(card: ModelCard) -> str:
    """The name llama-server knows the model by."""
    return card.upstream_name or card.name


def is_served(card: ModelCard, name: str) -> bool:
    """Whether ``name`` means the served model."""
    wanted = tagged(name)
    return any(wanted == tagged(known) for known in (card.name, card.header.stem, *card.aliases))


def check_ollama(context: ProxyContext, name: object, unknown: str = "model '{}' not found") -> str:
    """The requested name, to be echoed. Raises RequestError (none given) and ModelNotFoundError.

    ``unknown`` is how the route says that it has no such model; Ollama's have two ways.
    """
    if not isinstance(name, str) or not name.strip():
        raise RequestError("model is required")
    if context.unknown_model == "strict" and not is_served(context.model, name):
        raise ModelNotFoundError(unknown.format(name), f"this server has {listed_name(context.model)}")
    return name


def check_openai(context: ProxyContext, name: object) -> None:
    """Raise ModelNotFoundError for another model, where the operator wants it."""
    if (
        context.unknown_model_openai == "strict"
        and isinstance(name, str)
        and not is_served(context.model, name)
    ):
        raise ModelNotFoundError(f"the model {name!r} does not exist", f"this one does: {context.model.name}")


def capabilities_of(header: GgufHeader, engine_args: Sequence[str] = ()) -> tuple[str, ...]:
    """Ollama's capability words: from the chat template, the FIM tokens and llama-server's arguments."""
    template = header.chat_template
    found = ["completion"]
    if "tools" in template:
        found.append("tools")
    if header.has_fim:
        found.append("insert")
    if any(sign in template for sign in ("enable_thinking", "<think>", "reasoning_effort")):
        found.append("thinking")
    given = {argument.partition("=")[0].replace("_", "-") for argument in engine_args}
    found += [word for word, flags in _FLAGGED.items() if given & flags]
    return tuple(found)


def tags(card: ModelCard) -> dict[str, object]:
    """``GET /api/tags``."""
    return {"models": [{**_entry(card), "capabilities": list(card.capabilities)}]}


def running(card: ModelCard, loaded: bool, wall_ns: int, left_s: float | None) -> dict[str, object]:
    """``GET /api/ps``; the date of expiry, in a form that every parser of ISO dates takes.

    ``left_s``: seconds until the model is unloaded; None, for ever, is a date that is far off.
    """
    if not loaded:
        return {"models": []}
    now = datetime.fromtimestamp(wall_ns // 1_000_000_000, timezone.utc)
    entry = _entry(card)
    del entry["modified_at"]
    return {
        "models": [
            {
                **entry,
                "expires_at": (now + (_FOREVER if left_s is None else timedelta(seconds=left_s))).isoformat(),
                "size_vram": card.vram_bytes,
                "context_length": card.context_length,
            }
        ]
    }


def show(card: ModelCard, *, verbose: bool = False) -> dict[str, object]:
    """``POST /api/show``; ``verbose`` adds the tensors, which are many."""
    header = card.header
    tensors = [
        {"name": tensor.name, "type": tensor.type_name, "shape": list(tensor.shape)}
        for tensor in header.tensors
    ]
    return {
        "license": str(header.metadata.get("general.license", "")),
        "modelfile": f"FROM {listed_name(card)}\n",
        "parameters": f"{'num_ctx':<30} {card.context_length}",
        "template": header.chat_template,
        "details": _details(header),
        "model_info": _model_info(card),
        "capabilities": list(card.capabilities),
        "modified_at": _date(header.modified_at_s),
        **({"tensors": tensors} if verbose else {}),
    }


def openai_model(card: ModelCard) -> dict[str, object]:
    """``GET /v1/models/{id}``."""
    return {
        "id": listed_name(card),
        "object": "model",
        "created": int(card.header.modified_at_s),
        "owned_by": "moe-proxy",
    }


def openai_models(card: ModelCard) -> dict[str, object]:
    """``GET /v1/models``."""
    return {"object": "list", "data": [openai_model(card)]}


def parameter_size(count: int) -> str:
    """As Ollama writes it: 30.5B, 812M, 4.2K."""
    for unit, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= unit:
            digits = count / unit
            return f"{digits:.0f}{letter}" if letter == "M" and digits >= 10 else f"{digits:.1f}{letter}"
    return str(count)


def _entry(card: ModelCard) -> dict[str, object]:
    name = listed_name(card)
    return {
        "name": name,
        "model": name,
        "modified_at": _date(card.header.modified_at_s),
        "size": card.header.size_bytes,
        "digest": card.digest,
        "details": _details(card.header),
    }


def _details(header: GgufHeader) -> dict[str, object]:
    """Strings that are never null."""
    return {
        "parent_model": "",
        "format": "gguf",
        "family": header.architecture,
        "families": [header.architecture],
        "parameter_size": parameter_size(header.parameter_count),
        "quantization_level": header.quantization,
    }


def _model_info(card: ModelCard) -> Mapping[str, object]:
    """The header's scalars; the context that one slot really has is the first key that names a context."""
    header = card.header
    known: dict[str, object] = {
        _HEAD_KEYS[0]: header.architecture,
        _HEAD_KEYS[1]: header.parameter_count,
        f"{header.architecture}.context_length": card.context_length,
        f"{header.architecture}.embedding_length": header.embedding_length,
        "general.basename": header.basename or header.name or header.stem,
    }
    rest = {
        key: value
        for key, value in header.metadata.items()
        if key not in known and key != "tokenizer.chat_template"
    }
    return {**known, **rest}


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(int(seconds), timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
