"""Owns ``moe-proxy demo``: the whole path on the model that ships, with a table of what happened."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from moe_proxy.cli.client import get_json, paths_of
from moe_proxy.cli.serve import end_proxy, engine_for_start, examined, start_detached, these_alone
from moe_proxy.cli.units import percent_text
from moe_proxy.config import load_settings
from moe_proxy.engine.control import EngineControl
from moe_proxy.errors import NotRunningError
from moe_proxy.instance import RunningProxy, running_proxy
from moe_proxy.proxy.listening import free_port
from moe_proxy.served import SHIPPED

# A budget below the whole, so that the pager has something to decide.
_RAM_BUDGET = "40%"
_TOKENS = 64
_HOT_SHOWN = 4
# llama.cpp's threads wait for each other many times per token, by spinning. Where one of them shares its core
# with another program, as on the desktop of whoever tries this out, they spin away the time that it needs.
_PATIENT = {"OMP_WAIT_POLICY": "passive"}
_TRIES, _PAUSE_S = 50, 0.1
_PROMPTS = (
    ("openai", "Write a Python function that sorts a list of numbers."),
    ("openai", "Explain the Pythagorean theorem and prove it for a right triangle."),
    ("openai", "如何在 Linux 服务器上安装和配置 Docker 容器？"),
    ("openai", "Write a short story about an old lighthouse and the sea."),
    ("ollama", "Why is the sky blue?"),
)


@dataclass(frozen=True)
class _Row:
    """One prompt of the demo. Rates are shares of the picks of this prompt and its answer."""

    prompt: str
    api: str
    domain: str
    prior: str
    hit_before: str
    hit_after: str
    hot: str
    tokens_per_s: float
    answer: str


@click.command(epilog="Example: moe-proxy demo")
@click.option(
    "--model",
    type=click.Choice(SHIPPED),
    default=SHIPPED[0],
    show_default=True,
    help="one of the models that ship",
)
def demo(model: str) -> None:
    """Build, start, ask five prompts of different domains, show what the pager did, stop."""
    settings = load_settings({"port": free_port("127.0.0.1", 0)})
    # A model that ships, whatever is configured for another one.
    shipped = {
        "model": Path(model),
        "alias": None,
        "router_map": None,
        "pager": True,
        "ram_budget": _RAM_BUDGET,
    }
    settings = settings.model_copy(update=shipped)
    # An answer is no markup.
    console = Console(markup=False, emoji=False)
    progress = Console(stderr=True)
    examined(settings, progress)
    paths = paths_of(settings)
    paths.prepare()
    server = engine_for_start(settings, None, progress)
    environment = _PATIENT | these_alone(settings, server)
    start_detached(settings, environment, (), paths, progress)
    proxy = running_proxy(paths)
    if proxy is None:
        raise NotRunningError("the proxy ended as soon as it was ready", f"see {paths.proxy_log}")
    try:
        rows = [asyncio.run(_ask(proxy, paths.socket, api, prompt)) for api, prompt in _PROMPTS]
    finally:
        end_proxy(proxy, settings.drain_s, now=False)
    console.print(_report(rows))
    console.print(
        "before: share of this prompt's expert picks that were resident when it arrived;"
        " after: the same picks against what the pager had made resident by its end;"
        " hot experts: the most picked ones of the middle MoE layer.",
        style="dim",
    )


async def _ask(proxy: RunningProxy, socket: Any, api: str, prompt: str) -> _Row:
    async with EngineControl(socket) as control:
        before = await control.residency()
        request_id, answer, tokens_per_s = await asyncio.to_thread(_complete, proxy, api, prompt)
        usage = await control.usage(request=request_id)
        after = await control.residency()
        request = await _finished(proxy, request_id)
    return _Row(
        prompt=prompt,
        api=api,
        domain=f"{request['domain'] or 'none'} {request['confidence']:.2f}",
        prior=request["prior"] or "-",
        hit_before=_share(usage, before),
        hit_after=_share(usage, after),
        hot=_hot(usage),
        tokens_per_s=tokens_per_s,
        answer=answer,
    )


async def _finished(proxy: RunningProxy, request_id: str) -> Mapping[str, Any]:
    """What the proxy knows of a request; it notes that a little after the answer."""
    for _ in range(_TRIES):
        recent = (await asyncio.to_thread(get_json, proxy, "/stats"))["recent"]
        for request in recent:
            if request["id"] == request_id:
                found: Mapping[str, Any] = request
                return found
        await asyncio.sleep(_PAUSE_S)
    raise NotRunningError(f"the proxy at {proxy.url} has no record of request {request_id}", "try again")


def _share(usage: Mapping[str, Any], residency: Mapping[str, Any]) -> str:
    """Share of the counted picks whose expert is resident."""
    picks = hits = 0
    for layer, counts in usage["layers"].items():
        resident = set(residency["layers"].get(layer, ()))
        picks += sum(counts)
        hits += sum(count for expert, count in enumerate(counts) if expert in resident)
    return percent_text(hits, picks)


def _hot(usage: Mapping[str, Any]) -> str:
    """The most picked experts of the middle MoE layer, most picked first."""
    layers = sorted(usage["layers"], key=int)
    counts = usage["layers"][layers[len(layers) // 2]]
    ranked = sorted(range(len(counts)), key=lambda expert: -counts[expert])
    return " ".join(str(expert) for expert in ranked[:_HOT_SHOWN])


def _complete(proxy: RunningProxy, api: str, prompt: str) -> tuple[str, str, float]:
    """Ask one prompt in the wire form of ``api``; request id, answer, tokens per second.

    At temperature 0: the same answer each time.
    """
    request: dict[str, object] = {"model": proxy.model, "messages": [{"role": "user", "content": prompt}]}
    if api == "openai":
        body = _post(proxy, "/v1/chat/completions", request | {"max_tokens": _TOKENS, "temperature": 0})
        choice = body["choices"][0]
        answer, ended = choice["message"]["content"], choice["finish_reason"]
        tokens_per_s = body["timings"]["predicted_per_second"]
    else:
        options = {"num_predict": _TOKENS, "temperature": 0}
        body = _post(proxy, "/api/chat", request | {"stream": False, "options": options})
        answer, ended = body["message"]["content"], body["done_reason"]
        tokens_per_s = body["eval_count"] / body["eval_duration"] * 1e9
    return body["request_id"], f"{answer.strip()} …" if ended == "length" else answer, tokens_per_s


def _post(proxy: RunningProxy, path: str, body: Mapping[str, object]) -> dict[str, Any]:
    request = urllib.request.Request(  # noqa: S310 - the URL is our own proxy's
        proxy.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=120) as response:
        answer: dict[str, Any] = json.load(response)
        return answer | {"request_id": response.headers["X-Request-Id"]}


def _report(rows: list[_Row]) -> Group:
    """What was asked and answered, at full width, and below it one table of figures that fits 80 columns."""
    conversation = [
        part
        for number, row in enumerate(rows, 1)
        for part in (
            Text(f"{number}. {row.prompt} ({row.api} API)", style="bold"),
            Padding(Text(row.answer.strip()), (0, 0, 1, 3)),
        )
    ]
    return Group(*conversation, _table(rows))


def _table(rows: list[_Row]) -> Table:
    # No rules between columns: every one of the 80 cells is needed for words.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("#", justify="right")
    for column in ("domain", "prior"):
        table.add_column(column, no_wrap=True)
    for column in ("before", "after"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("hot experts", no_wrap=True)
    table.add_column("tokens/s", justify="right")
    for number, row in enumerate(rows, 1):
        table.add_row(
            str(number),
            row.domain,
            row.prior,
            row.hit_before,
            row.hit_after,
            row.hot,
            f"{row.tokens_per_s:.0f}",
        )
    return table
