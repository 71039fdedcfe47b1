"""Owns the OpenAPI description of the routes: what each takes and gives. Pure data, served as it is.

Bodies that go through to llama-server unchanged are described as far as the proxy looks at them.
"""

from __future__ import annotations

from collections.abc import Mapping

from moe_proxy import __version__

Json = Mapping[str, object]

_TEXT: Json = {"type": "string"}
_FLAG: Json = {"type": "boolean"}
_DURATION: Json = {
    "description": "Seconds, or a duration such as 5m; negative is for ever, 0 unloads.",
    "oneOf": [{"type": "number"}, {"type": "string"}],
}
_TEXTS: Json = {"oneOf": [_TEXT, {"type": "array", "items": _TEXT}]}
_OBJECTS: Json = {"type": "array", "items": {"type": "object"}}


def _object(required: tuple[str, ...] = (), **properties: Json) -> Json:
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


_MESSAGES: Json = {
    "type": "array",
    "items": _object(("role",), role=_TEXT, content={"oneOf": [_TEXT, _OBJECTS]}),
}
_ANSWER: Json = _object(("domain", "confidence", "classifier"), confidence={"type": "number"})
_OLLAMA: Mapping[str, Json] = {
    "model": _TEXT, "stream": {"type": "boolean", "default": True}, "format": {},
    "options": {"type": "object"}, "keep_alive": _DURATION,
    "think": {"oneOf": [_FLAG, {"enum": ["low", "medium", "high", "max"]}]},
}  # fmt: skip
_SCHEMAS: Mapping[str, Json] = {
    "OllamaChat": _object(("model",), **_OLLAMA, tools=_OBJECTS, messages={
        "type": "array",
        "items": _object(("role",), role=_TEXT, content=_TEXT, thinking=_TEXT, tool_calls=_OBJECTS,
                         tool_name=_TEXT, images={"type": "array", "items": _TEXT}),
    }),
    "OllamaGenerate": _object(("model",), **_OLLAMA, prompt=_TEXT, suffix=_TEXT, system=_TEXT, raw=_FLAG,
                              images={"type": "array", "items": _TEXT}),
    "OllamaModel": _object(("model",), model=_TEXT, verbose=_FLAG),
    "OllamaPull": _object(("model",), model=_TEXT, stream=_FLAG),
    "OllamaEmbed": _object(("model",), model=_TEXT, input=_TEXTS, truncate=_FLAG,
                           dimensions={"type": "integer"}, keep_alive=_DURATION),
    "OllamaEmbeddings": _object(("model",), model=_TEXT, prompt=_TEXT, keep_alive=_DURATION),
    "Chat": _object(("messages",), model=_TEXT, messages=_MESSAGES, stream=_FLAG),
    "Prompt": _object(("prompt",), model=_TEXT, prompt=_TEXT, stream=_FLAG),
    "Responses": _object(("input",), model=_TEXT, input={"oneOf": [_TEXT, _OBJECTS]}, stream=_FLAG),
    "Embeddings": _object(("input",), model=_TEXT, input=_TEXTS),
    "Label": _object(("domain",), domain=_TEXT, text=_TEXT, messages=_MESSAGES, prompt=_TEXT),
    "Labelled": _object(("domain", "before", "after"), domain=_TEXT, before=_ANSWER, after=_ANSWER),
    "Body": {"type": "object"},
    "OllamaError": _object(("error",), error=_TEXT),
    "OpenAIError": _object(("error",), error=_object(("code", "message", "type"))),
    "AnthropicError": _object(("error",), error=_object(("type", "message"))),
    "Health": _object(("status", "state"), status=_TEXT, state=_TEXT),
    "Model": _object(("id", "object", "created", "owned_by"), id=_TEXT),
    "Models": _object(("object", "data"), data={"type": "array", "items": {"type": "object"}}),
    "Version": _object(("version",), version={"type": "string", "pattern": r"^\d+\.\d+\.\d+$"}),
    "OllamaModels": _object(("models",), models=_OBJECTS),
    "OllamaShow": _object(("details", "model_info", "capabilities"), model_info=_object(
        ("general.architecture", "general.parameter_count", "general.basename")
    )),
}  # fmt: skip

_JSON, _NDJSON, _EVENTS = "application/json", "application/x-ndjson", "text/event-stream"
_STREAM = (_JSON, _NDJSON)
_SSE = (_JSON, _EVENTS)
# Method, path, what it does, the body's schema, the answer's schema, the answer's media types.
_ROUTES: tuple[tuple[str, str, str, str, str, tuple[str, ...]], ...] = (
    ("get", "/", "That it runs; a page for browsers", "", "", ("text/plain", "text/html")),
    ("get", "/health", "Whether a request would be computed; 503 says why not", "", "Health", (_JSON,)),
    ("get", "/livez", "Whether the proxy answers", "", "Body", (_JSON,)),
    ("get", "/stats", "What really happened, in numbers", "", "Body", (_JSON,)),
    ("post", "/stats/label", "Say what a text really is about", "Label", "Labelled", (_JSON,)),
    ("get", "/metrics", "The same for Prometheus, and llama-server's own", "", "", ("text/plain",)),
    ("get", "/dashboard", "A page that shows it all, live", "", "", ("text/html",)),
    ("get", "/dashboard/{name}", "A file of that page", "", "", ("text/css", "text/javascript", "text/html")),
    ("get", "/dashboard/events", "What that page shows, as it changes", "", "", (_EVENTS,)),
    ("get", "/openapi.json", "This description", "", "Body", (_JSON,)),
    ("post", "/v1/chat/completions", "OpenAI chat", "Chat", "", _SSE),
    ("post", "/v1/completions", "OpenAI completion", "Prompt", "", _SSE),
    ("post", "/v1/responses", "OpenAI response", "Responses", "", _SSE),
    ("post", "/v1/messages", "Anthropic message", "Chat", "", _SSE),
    ("post", "/v1/messages/count_tokens", "Tokens of an Anthropic message", "Chat", "", (_JSON,)),
    ("post", "/v1/embeddings", "OpenAI embeddings", "Embeddings", "", (_JSON,)),
    ("post", "/v1/rerank", "Rerank documents", "Body", "", (_JSON,)),
    ("get", "/v1/models", "The served model", "", "Models", (_JSON,)),
    ("get", "/v1/models/{name}", "The served model, by one of its names", "", "Model", (_JSON,)),
    ("post", "/completion", "llama-server completion", "Prompt", "", _SSE),
    ("post", "/infill", "llama-server fill in the middle", "Body", "", _SSE),
    ("post", "/tokenize", "Tokens of a text", "Body", "", (_JSON,)),
    ("post", "/detokenize", "Text of tokens", "Body", "", (_JSON,)),
    ("post", "/apply-template", "The prompt of a chat", "Chat", "", (_JSON,)),
    ("get", "/props", "llama-server's properties", "", "", (_JSON,)),
    ("get", "/slots", "llama-server's slots", "", "", (_JSON,)),
    ("get", "/ui", "llama-server's own page, where it was built in", "", "", ("text/html",)),
    ("get", "/ui/{name}", "A file of that page", "", "", ("text/html",)),
    ("get", "/api/version", "Version of the Ollama API that is spoken", "", "Version", (_JSON,)),
    ("get", "/api/tags", "The served model", "", "OllamaModels", (_JSON,)),
    ("get", "/api/ps", "The served model, while it is loaded", "", "OllamaModels", (_JSON,)),
    ("post", "/api/show", "What the model is and can do", "OllamaModel", "OllamaShow", (_JSON,)),
    ("post", "/api/chat", "Ollama chat; without messages: load or unload", "OllamaChat", "", _STREAM),
    ("post", "/api/generate", "Ollama completion; or load, unload", "OllamaGenerate", "", _STREAM),
    ("post", "/api/embed", "Ollama embeddings", "OllamaEmbed", "", (_JSON,)),
    ("post", "/api/embeddings", "Ollama embedding, the older form", "OllamaEmbeddings", "", (_JSON,)),
    ("post", "/api/pull", "Done for the served model; others are refused", "OllamaPull", "", _STREAM),
)  # fmt: skip
# Refuse what they understand: to fetch another model, to embed with a model that does not, to learn unasked.
_REFUSING = frozenset(
    {"/stats/label", "/api/pull", "/api/embed", "/api/embeddings", "/v1/embeddings", "/v1/rerank"}
)
# Known to Ollama's clients, and never done here.
_REFUSED = (("post", "/api/push"), ("post", "/api/create"), ("post", "/api/copy"), ("delete", "/api/delete"),
            ("post", "/api/blobs/{name}"), ("get", "/api/blobs/{name}"))  # fmt: skip


def description() -> dict[str, object]:
    """The OpenAPI 3.1 document."""
    paths: dict[str, dict[str, Json]] = {}
    for method, path, summary, body, answer, kinds in _ROUTES:
        paths.setdefault(path, {})[method] = _operation(path, summary, body, answer, kinds)
    for method, path in _REFUSED:
        responses = {"501": _error(path, "Not supported"), "default": _error(path, "Another error")}
        refused: Json = {"summary": "Not supported", "responses": responses, **_parameters(path)}
        paths.setdefault(path, {})[method] = refused
    return {
        "openapi": "3.1.0",
        "info": {"title": "moe-proxy", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": _SCHEMAS,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(path: str, summary: str, body: str, answer: str, kinds: tuple[str, ...]) -> Json:
    schema = {"schema": {"$ref": f"#/components/schemas/{answer}"}} if answer else {}
    responses: dict[str, Json] = {
        "200": {"description": "OK", "content": dict.fromkeys(kinds, schema)},
        "default": _error(path, "The error in the form of the route's family"),
    }
    if path in _REFUSING:
        responses["501"] = _error(path, "Not supported for this model")
    request = {
        "requestBody": {
            "required": True,
            "content": {_JSON: {"schema": {"$ref": f"#/components/schemas/{body}"}}},
        }
    }
    return {"summary": summary, **_parameters(path), **(request if body else {}), "responses": responses}


def _parameters(path: str) -> Json:
    name = {"name": "name", "in": "path", "required": True, "schema": _TEXT}
    return {"parameters": [name]} if "{name}" in path else {}


def _error(path: str, text: str) -> Json:
    family = "Ollama" if path == "/" or path.startswith("/api/") else "OpenAI"
    family = "Anthropic" if path.startswith("/v1/messages") else family
    if path == "/health":
        family = ""
    schema = f"{family}Error" if family else "Health"
    return {"description": text, "content": {_JSON: {"schema": {"$ref": f"#/components/schemas/{schema}"}}}}
