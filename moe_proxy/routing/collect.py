"""Owns how labelled prompts become a router map: run each, read what it picked, add it up.

It knows no transport, and no file but the prompts that ship with the package.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moe_proxy.domains.base import DOMAINS
from moe_proxy.errors import ControlError
from moe_proxy.routing.labelled import split
from moe_proxy.routing.router_map import DomainCounts, ModelKey, RouterMap

_PROMPTS = Path(__file__).with_name("prompts")


class CollectEngine(Protocol):
    """What collecting needs of an engine."""

    async def complete(self, text: str, request_id: str) -> None:
        """Answer ``text`` as a chat of one turn, under ``request_id``;

        returns when the answer is complete.
        """
        ...

    async def usage(self, request_id: str) -> Mapping[str, object]:
        """The answer of ``GET /experts/usage`` for that request:

        ``tokens``, and counts by layer under ``layers``.
        """
        ...


Keep = Callable[[RouterMap, int], Awaitable[None]]
"""Given the map so far, and how many prompts are in it."""


def builtin_prompts() -> Mapping[str, tuple[str, ...]]:
    """The shipped prompts of each domain from which a first map is made."""
    return {domain: prompts[0::2] for domain, prompts in _shipped().items()}


def held_out_prompts() -> Mapping[str, tuple[str, ...]]:
    """The other half of the shipped prompts: never collected from, for judging a map."""
    return {domain: prompts[1::2] for domain, prompts in _shipped().items()}


def _shipped() -> dict[str, tuple[str, ...]]:
    return {domain: split((_PROMPTS / f"{domain}.txt").read_text(encoding="utf-8")) for domain in DOMAINS}


async def collect(
    engine: CollectEngine,
    prompts: Mapping[str, Sequence[str]],
    key: ModelKey,
    *,
    made: Mapping[str, object],
    progress: Callable[[int, int], None] = lambda done, total: None,
    new_request_id: Callable[[], str] = lambda: secrets.token_hex(8),
    begun: tuple[RouterMap, int] | None = None,
    keep: Keep | None = None,
) -> RouterMap:
    """Run ``prompts`` (by domain) through ``engine``, one after the other, and add their picks up.

    ``made`` goes into the map, with the number of tokens added; ``progress`` is told (done, total) after each
    prompt, and ``keep`` is given the map so far. With ``begun``, such a map, that many prompts are in it and
    not run again. Raises what the engine raises, and ControlError for counts that do not fit the model of
    ``key``.
    """
    so_far, done = begun or (RouterMap(key, {}, {}), 0)
    tokens = {domain: counted.tokens for domain, counted in so_far.domains.items()}
    counts = dict(so_far.counts)
    nothing = np.zeros((len(key.layers), key.experts), np.int64)

    def now() -> RouterMap:
        return RouterMap(
            key,
            {**made, "tokens": sum(tokens.values())},
            {domain: _counted(tokens.get(domain, 0), counts.get(domain, nothing), key) for domain in prompts},
        )

    work = [(domain, text) for domain, texts in prompts.items() for text in texts]
    progress(done, len(work))
    for domain, text in work[done:]:
        request_id = new_request_id()
        await engine.complete(text, request_id)
        more, picks = counts_of(await engine.usage(request_id), key)
        tokens[domain] = tokens.get(domain, 0) + more
        counts[domain] = counts.get(domain, nothing) + picks
        done += 1
        if keep is not None:
            await keep(now(), done)
        progress(done, len(work))
    return now()


def _counted(tokens: int, counts: npt.NDArray[np.int64], key: ModelKey) -> DomainCounts:
    rows = (tuple(int(count) for count in row) for row in counts)
    return DomainCounts(tokens, dict(zip(key.layers, rows, strict=True)))


def counts_of(usage: Mapping[str, object], key: ModelKey) -> tuple[int, npt.NDArray[np.int64]]:
    """Tokens and an array (MoE layers, experts) of one request's counts, of ``GET /experts/usage``.

    Raises ControlError for counts that do not fit the model of ``key``.
    """
    tokens, layers = usage.get("tokens"), usage.get("layers")
    if type(tokens) is not int or tokens < 0:
        raise _refused(f"tokens is {tokens!r}")
    if not isinstance(layers, Mapping) or set(layers) != {str(layer) for layer in key.layers}:
        raise _refused(f"its layers are not the model's {len(key.layers)} MoE layers")
    rows = [layers[str(layer)] for layer in key.layers]
    for layer, row in zip(key.layers, rows, strict=True):
        if (
            not isinstance(row, list)
            or len(row) != key.experts
            or any(type(count) is not int or count < 0 for count in row)
        ):
            raise _refused(f"layer {layer} is not {key.experts} counts")
    return tokens, np.array(rows, np.int64)


def _refused(reason: str) -> ControlError:
    return ControlError(
        f"the pager's usage counts do not fit the model: {reason}",
        "the engine serves another model than the map is made for, or is of another version",
    )
