"""Owns how models on disk fit a machine, and which of them fits best. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moe_proxy.errors import ConfigError
from moe_proxy.forecast import Case, assumed, forecast
from moe_proxy.hardware import Hardware
from moe_proxy.model.folder import MoeModel
from moe_proxy.planner import Context, Wanted

Place = Literal["VRAM", "VRAM and RAM", "RAM", "disk", "nowhere"]
"""Where the slowest experts are read from. "nowhere": the rest of the model has no room."""

_TEXT = {
    "VRAM": "all of it in VRAM",
    "VRAM and RAM": "hot experts in VRAM, all of them in RAM",
    "RAM": "all of it in RAM",
    "disk": "some of its experts on disk",
    "nowhere": "even without its experts too large",
}


@dataclass(frozen=True)
class Fit:
    """How one model fits. ``tokens_per_s`` is an estimate, without a router map; 0 where it does not fit."""

    model: MoeModel
    place: Place
    tokens_per_s: float

    @property
    def text(self) -> str:
        """The place in words."""
        return _TEXT[self.place]


def fit_of(model: MoeModel, hardware: Hardware, *, gpu: bool, tokens: int) -> Fit:
    """How ``model`` fits ``hardware``, with ``tokens`` of context, computed on the GPU or not."""
    wanted = Wanted(gpu, Context(min(tokens, model.header.context_length or tokens)))
    case = Case(model.layout, model.footprint, hardware, wanted, assumed(hardware), None)
    try:
        found = forecast(case)
    except ConfigError:
        return Fit(model, "nowhere", 0.0)
    if found.ram.over_bytes or (found.vram is not None and found.vram.over_bytes):
        return Fit(model, "nowhere", 0.0)
    place: Place = "RAM" if found.plan.experts_fit else "disk"
    if found.plan.vram is not None and found.plan.vram.placement != "none":
        place = "VRAM" if found.plan.vram.placement == "all" else "VRAM and RAM"
    return Fit(model, place, found.tokens_per_s)


def best(fits: Sequence[Fit]) -> tuple[Fit, str]:
    """The largest model whose experts all fit, and why it; of equals the file with most bytes.

    Where none fits wholly, the smallest that runs from disk. Raises ConfigError when none runs.
    """

    def size(fit: Fit) -> tuple[int, int]:
        return fit.model.header.parameter_count, fit.model.header.size_bytes

    whole = [fit for fit in fits if fit.place in ("VRAM", "VRAM and RAM", "RAM")]
    from_disk = [fit for fit in fits if fit.place == "disk"]
    if whole:
        chosen = max(whole, key=size)
        why = f"the largest of {len(fits)} that fits ({chosen.text})"
    elif from_disk:
        chosen = min(from_disk, key=size)
        why = f"none of {len(fits)} fits wholly, so the smallest ({chosen.text})"
    else:
        raise ConfigError(
            f"none of the {len(fits)} models fits this machine",
            "see moe-proxy model list for what each takes",
        )
    return chosen, why
