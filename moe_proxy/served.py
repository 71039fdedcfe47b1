"""Owns what is found out before a model is served: file, layout, memory plan, router map.

Everything that can be wrong is found here, before something slow begins. It starts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moe_proxy.config import Settings
from moe_proxy.domains.base import Classifier
from moe_proxy.domains.choice import classifier_of
from moe_proxy.errors import ConfigError, RouterMapError
from moe_proxy.hardware import Hardware, probe
from moe_proxy.model.demo import DEMO_NAME
from moe_proxy.model.demo_source import Progress, demo_path, quiet
from moe_proxy.model.gguf_header import GgufHeader, read_header
from moe_proxy.model.layout import ModelLayout, layout_of
from moe_proxy.model.planted import PLANTED_NAME, planted_path
from moe_proxy.planner import Plan, parse_budget, parse_vram_budget, plan, plan_gpu
from moe_proxy.resources import data_path
from moe_proxy.routing.foreign import load_any
from moe_proxy.routing.map_facts import keep_top
from moe_proxy.routing.router_map import ModelKey, RouterMap, check, load

# Unless told otherwise: enough for a long conversation, small beside the experts of any model this is for.
_CONTEXT = 16384

SHIPPED = (DEMO_NAME, PLANTED_NAME)
"""Names of the models that ship; the first one is served unless told otherwise."""


@dataclass(frozen=True)
class Served:
    """What is going to be served and what was found out about it; ``notes`` are for the operator."""

    settings: Settings
    model: Path
    header: GgufHeader
    layout: ModelLayout
    plan: Plan
    router_map: RouterMap | None
    classifier: Classifier
    notes: tuple[str, ...]

    @property
    def alias(self) -> str:
        """The model's name towards clients."""
        return self.settings.alias or self.header.stem

    @property
    def context_length(self) -> int:
        """Tokens of context; the KV cache of a model's full context can be larger than its experts."""
        asked = self.settings.context_length
        return asked if asked is not None else min(self.header.context_length or _CONTEXT, _CONTEXT)


def model_file(settings: Settings, progress: Progress = quiet) -> Path:
    """The file to serve: the one that was named, or the demonstration model; made when it is not there yet.

    The names of the models that ship stand for them where no file is called so. Raises ModelFileError, and
    ConfigError for a cache that cannot be written.
    """
    named = settings.model
    if named is not None and (named.exists() or str(named) not in SHIPPED):
        return named
    try:
        if named == Path(PLANTED_NAME):
            return planted_path(settings.cache_dir)
        return demo_path(settings.cache_dir, progress=progress)
    except OSError as error:
        raise ConfigError(
            f"cannot make the model that ships in {settings.cache_dir}: {error.strerror or error}",
            "set MOE_PROXY_CACHE_DIR to a folder you may write, on a disk with room",
        ) from error


def examine(settings: Settings, progress: Progress = quiet) -> Served:
    """Read the model and the map, and plan memory; ``progress`` is told of a model that is being made.

    Raises ModelFileError, RouterMapError, ConfigError.
    """
    model = model_file(settings, progress)
    header = read_header(model)
    layout = layout_of(header)
    hardware = probe()
    router_map, notes = _router_map(settings, layout)
    return Served(
        settings=settings,
        model=model,
        header=header,
        layout=layout,
        plan=plan_of(settings, layout, hardware),
        router_map=router_map,
        classifier=classifier_of(settings),
        notes=tuple(notes),
    )


def plan_of(settings: Settings, layout: ModelLayout, hardware: Hardware) -> Plan:
    """The memory plan that ``settings`` ask for. Raises ConfigError."""
    ram = parse_budget(settings.ram_budget) if settings.ram_budget else None
    vram = parse_vram_budget(settings.vram_budget) if settings.vram_budget else None
    if not settings.gpu:
        if vram is not None:
            raise ConfigError(
                "a VRAM budget needs a GPU", "start with --gpu as well, or leave --vram-budget out"
            )
        return plan(layout, hardware, ram)
    if not hardware.gpus:
        raise ConfigError("no NVIDIA GPU was found", "start with --cpu, or see what nvidia-smi says")
    return plan_gpu(layout, hardware, ram, vram)


def _router_map(settings: Settings, layout: ModelLayout) -> tuple[RouterMap | None, list[str]]:
    """The map that was asked for, or the shipped one of this very model, with warnings about it."""
    if settings.router_map is not None:
        asked = load_any(settings.router_map, ModelKey.of(layout))
        return _cut(asked, settings), check(asked, layout)
    for path in sorted(data_path("maps").glob("*.json")):
        shipped = load(path)
        try:
            return _cut(shipped, settings), check(shipped, layout)
        except RouterMapError:
            continue
    note = (
        f"There is no router map for {layout.name}: the pager goes by its own counts until you collect one."
    )
    return None, [note]


def _cut(router_map: RouterMap, settings: Settings) -> RouterMap:
    """The map with each layer's busiest experts alone, when that was asked for."""
    return keep_top(router_map, settings.router_top_k) if settings.router_top_k else router_map
