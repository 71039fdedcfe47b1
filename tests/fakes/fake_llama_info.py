"""The routes of the fake llama-server that generate nothing."""

from __future__ import annotations

import asyncio
import gzip

from aiohttp import web
from fake_llama_answers import prompt_text
from fake_llama_state import FAKE, error


async def embeddings(request: web.Request) -> web.Response:
    """POST /v1/embeddings."""
    fake, body = request.app[FAKE], await request.json()
    if fake.switches.error_status:
        return error(fake.switches.error_status, "the fake refuses", "server_error")
    inputs = body.get("input", "")
    inputs = inputs if isinstance(inputs, list) else [inputs]
    if fake.switches.embed_hang:
        await asyncio.Event().wait()
    if not fake.switches.pooling:
        return error(501, "This server does not support embeddings", "not_supported_error")
    longest = max((len(item) if isinstance(item, list) else len(item.split()) for item in inputs), default=0)
    if 0 < fake.switches.embed_limit < longest:
        size = f"(current batch size: {fake.switches.embed_limit})"
        text = f"input ({longest} tokens) is too large to process. increase the physical batch size {size}"
        return error(500, text, "server_error")
    data = [
        {"embedding": [float(len(str(item))), 1.0, 0.5, 0.25], "index": index, "object": "embedding"}
        for index, item in enumerate(inputs)
    ]
    count = sum(max(1, len(str(item).split())) for item in inputs)
    usage = {"prompt_tokens": count, "total_tokens": count}
    return web.json_response(
        {"model": body.get("model", fake.alias), "object": "list", "usage": usage, "data": data}
    )


async def health(request: web.Request) -> web.Response:
    """GET /health once ready."""
    return web.json_response({"status": "ok"})


async def models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    fake = request.app[FAKE]
    meta = {"vocab_type": 2, "n_vocab": 512, "n_ctx": fake.context_length, "n_ctx_train": 4096, "n_embd": 64}
    entry = {
        "id": fake.alias,
        "aliases": [],
        "object": "model",
        "created": 1,
        "owned_by": "llamacpp",
        "meta": meta,
    }
    return web.json_response({"models": [], "object": "list", "data": [entry]})


async def props(request: web.Request) -> web.Response:
    """GET /props."""
    fake = request.app[FAKE]
    return web.json_response(
        {
            "default_generation_settings": {"params": {}, "n_ctx": fake.context_length},
            "total_slots": fake.slots,
            "model_alias": fake.alias,
            "model_path": fake.model,
            "modalities": {"vision": False, "video": False, "audio": False},
            "endpoint_slots": True,
            "endpoint_props": False,
            "endpoint_metrics": True,
            "chat_template": "{{ messages }}",
            "chat_template_caps": {},
            "bos_token": "<s>",
            "eos_token": "</s>",
            "build_info": "fake-0",
            "media_marker": "<__fake_media__>",
            "is_sleeping": False,
        }
    )


async def slots(request: web.Request) -> web.Response:
    """GET /slots."""
    fake = request.app[FAKE]
    busy = sum(1 for seen in fake.requests if not seen.finished and "completion" in seen.path)
    return web.json_response(
        [
            {"id": slot, "n_ctx": fake.context_length, "speculative": False, "is_processing": slot < busy}
            for slot in range(fake.slots)
        ]
    )


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize: one token per word."""
    content = str((await request.json()).get("content", ""))
    return web.json_response({"tokens": [len(word) for word in content.split()]})


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize."""
    return web.json_response({"content": " ".join("x" * n for n in (await request.json()).get("tokens", []))})


async def apply_template(request: web.Request) -> web.Response:
    """POST /apply-template."""
    return web.json_response({"prompt": prompt_text(await request.json())})


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics."""
    fake = request.app[FAKE]
    text = "# HELP llamacpp:tokens_predicted_total Number of generation tokens processed.\n"
    text += "# TYPE llamacpp:tokens_predicted_total counter\n"
    return web.Response(text=text + f"llamacpp:tokens_predicted_total {fake.counters['tokens']}\n")


PAGE = {
    "/": ("text/html", b"<!doctype html><script src=./_app/start.js></script>"),
    "/_app/start.js": ("text/javascript", b"fetch('./props')"),
}


async def unknown(request: web.Request) -> web.Response:
    """Any other route: a file of its page, stored compressed, or not there, said in JSON."""
    if request.app[FAKE].switches.page and request.path in PAGE:
        if "gzip" not in request.headers.get("Accept-Encoding", ""):
            return web.Response(status=415, text="Error: gzip is not supported by this browser")
        kind, data = PAGE[request.path]
        headers = {"Content-Encoding": "gzip", "Content-Type": kind, "ETag": '"1"'}
        return web.Response(body=gzip.compress(data), headers=headers)
    return error(404, "File Not Found", "not_found_error")
