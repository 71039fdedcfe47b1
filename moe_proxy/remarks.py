"""Owns what is worth telling an operator about the counters behind ``/stats``: what is wrong, and the cure.

Pure. It states what the counters say, and never guesses at what they do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Json = Mapping[str, Any]

# So many picks say something: a few tokens of a model with many layers.
_ENOUGH_PICKS = 1000
_ENOUGH_TOKENS = 200
_ENOUGH_REQUESTS = 3
# As in a router map: a layer whose busiest experts take more than this routes all tokens alike.
_CONSTANT_SHARE = 0.99


@dataclass(frozen=True)
class Remark:
    """One sentence; ``warn`` asks for something to be done, ``note`` explains."""

    level: Literal["warn", "note"]
    text: str


def remarks(stats: Json) -> list[Remark]:
    """What the JSON of ``/stats`` gives reason to say, warnings first."""
    engine, requests = stats["engine"], stats["requests"]
    found: list[Remark] = []
    if engine["state"] in ("crashed", "failed"):
        found.append(_warn(f"llama-server has {engine['state']}: {engine['reason']}"))
    if engine["restarts"]:
        found.append(_warn(f"llama-server was restarted, {engine['restarts']} so far: see moe-proxy logs"))
    for step, count in sorted(requests["step_failures"].items()):
        found.append(_warn(f"the step {step} failed beside {count} answers: see moe-proxy logs --proxy"))
    if not stats["pager"]:
        found.append(_note("the expert pager is off: no experts are counted, and no prior is used"))
    elif stats["experts"] is None:
        if engine["state"] == "ready":
            found.append(_warn("the pager does not answer: nothing is known of experts"))
    else:
        found += _of_experts(stats)
    return sorted(found, key=lambda remark: remark.level != "warn")


def constant_layers(picks: Mapping[str, Sequence[int]], experts_used: int) -> list[str]:
    """The layers whose tokens all went to the same experts; ``picks`` counts them by layer.

    Too few picks say nothing, and neither does a model that uses all its experts.
    """
    found = []
    for layer, row in picks.items():
        total = sum(row)
        if experts_used < len(row) and total >= _ENOUGH_TOKENS * experts_used:
            busiest = sum(sorted(row)[-experts_used:])
            if busiest > _CONSTANT_SHARE * total:
                found.append(layer)
    return found


def constant_routing(layers: Sequence[str]) -> list[Remark]:
    """A warning when there are any."""
    if not layers:
        return []
    named = ", ".join(layers[:8]) + (", …" if len(layers) > 8 else "")
    return [
        _warn(
            f"every token goes to the same experts in {len(layers)} layers ({named}): the mark of broken"
            " router logits; try another GGUF of the model"
        )
    ]


def _of_experts(stats: Json) -> list[Remark]:
    experts, prior = stats["experts"], stats["prior"]
    found = []
    # Of each request by itself: the counters of the engine start anew with it, also after it was unloaded.
    seen = [request["tokens"] for request in stats["recent"] if request["classifier"]]
    if len(seen) >= _ENOUGH_REQUESTS and not any(seen) and stats["latency"]["duration_s"]["count"]:
        found.append(
            _warn(f"the pager is on and inert: it counted no token of the last {len(seen)} requests")
        )
    elif experts["picks"] >= _ENOUGH_PICKS and not experts["hits"] and experts["budget_bytes"]:
        found.append(_warn(f"the cache is on and inert: none of {experts['picks']} picks was a hit"))
    if prior["failed"] and not prior["pushed"]:
        found.append(_warn(f"no prior reached the pager, {prior['failed']} tries failed"))
    found += [_note(reason) for reason in experts["reasons"]]
    if prior["map"] is None:
        found.append(_note("no router map of this model: the pager lives on its own counts"))
    return found


def _warn(text: str) -> Remark:
    return Remark("warn", text)


def _note(text: str) -> Remark:
    return Remark("note", text)
