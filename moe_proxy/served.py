"""Owns what is found out before a model is served: file, layout, memory plan, router map.

Everything that can be wrong is found here, before something slow begins. It starts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from moe_proxy import planner
from moe_proxy.calibration import Calibration, calibrated, calibration_path
from moe_proxy.calibration import read as read_calibration
from moe_proxy.config import Settings
from moe_proxy.domains.base import Classifier
from moe_proxy.domains.choice import classifier_of
from moe_proxy.errors import ConfigError, RouterMapError
from moe_proxy.fit import best, fit_of
from moe_proxy.forecast import Bandwidths, Case, Rate, assumed
from moe_proxy.hardware import Hardware, probe
from moe_proxy.instance import instance_paths
from moe_proxy.learning import learned_path
from moe_proxy.model.demo import DEMO_NAME
from moe_proxy.model.demo_source import Progress, demo_path, quiet
from moe_proxy.model.folder import MoeModel, gguf_files, look_at, of_hub_name
from moe_proxy.model.footprint import Footprint, footprint_of
from moe_proxy.model.gguf_header import GgufHeader, read_header
from moe_proxy.model.hub_name import parse_hub_name
from moe_proxy.model.layout import ModelLayout, layout_of
from moe_proxy.model.planted import PLANTED_NAME, planted_path
from moe_proxy.planner import Context, Plan, Wanted, parse_budget, parse_vram_budget
from moe_proxy.resources import data_path
from moe_proxy.routing.foreign import load_any
from moe_proxy.routing.learner import Learner
from moe_proxy.routing.map_facts import keep_top
from moe_proxy.routing.router_map import ModelKey, RouterMap, check, load

# Unless told otherwise: enough for a long conversation, small beside the experts of any model this is for.
DEFAULT_CONTEXT = 16384

AUTO = "auto"
"""What ``--model`` calls the best of the models that were downloaded."""

SHIPPED = (DEMO_NAME, PLANTED_NAME)
"""Names of the models that ship; the first one is served unless told otherwise."""


@dataclass(frozen=True)
class Served:
    """What is going to be served and what was found out about it; ``notes`` are for the operator.

    ``settings`` are those that were ``asked`` for, with what ``calibration`` found where nothing was set.
    """

    asked: Settings
    calibration: Calibration | None
    settings: Settings
    model: Path
    header: GgufHeader
    layout: ModelLayout
    footprint: Footprint
    hardware: Hardware
    wanted: Wanted
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
        """Tokens of context of one slot."""
        return context_length(self.settings, self.header)


def model_file(settings: Settings, progress: Progress = quiet) -> Path:
    """The file to serve: the one that was named, or the demonstration model; made when it is not there yet.

    Where no file is called so, the names of the models that ship stand for them, REPO:QUANT for a model that
    was downloaded, and ``auto`` for the best one of those. Raises ModelFileError, and ConfigError for a cache
    that cannot be written.
    """
    return _chosen(settings, None, progress)[0]


def _chosen(settings: Settings, hardware: Hardware | None, progress: Progress) -> tuple[Path, list[str]]:
    """``model_file``, and what is to be said of the choice."""
    named = settings.model
    if named is not None and not named.exists() and str(named) not in SHIPPED:
        if str(named) == AUTO:
            return _best(settings, hardware or probe())
        if name := parse_hub_name(str(named)):
            return of_hub_name(settings.models_dir, name), []
    return _named(settings, progress), []


def _best(settings: Settings, hardware: Hardware) -> tuple[Path, list[str]]:
    """The best of the models that were downloaded, and why it."""
    looked_at = [look_at(path) for path in gguf_files([settings.models_dir])]
    models = [model for model in looked_at if isinstance(model, MoeModel)]
    if not models:
        raise ConfigError(
            f"there is no MoE model in {settings.models_dir} to choose from",
            "put one there, or see moe-proxy model download --help",
        )
    tokens = settings.context_length or DEFAULT_CONTEXT
    fits = [fit_of(model, hardware, gpu=settings.gpu, tokens=tokens) for model in models]
    chosen, why = best(fits)
    return chosen.model.path, [f"Chosen by --model auto: {chosen.model.path}, {why}."]


def _named(settings: Settings, progress: Progress) -> Path:
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


def examine(
    settings: Settings,
    progress: Progress = quiet,
    *,
    hardware: Hardware | None = None,
    cache_types: tuple[str, str] = ("f16", "f16"),
    complete: bool = True,
) -> Served:
    """Read the model and the map, and plan memory; ``progress`` is told of a model that is being made.

    ``hardware`` stands for another machine than this one, ``cache_types`` are those of keys and values, and a
    file that need not be ``complete`` may be its header alone: then no map is known to be of this model but
    the one that was named. Raises ModelFileError, RouterMapError, ConfigError.
    """
    hardware = hardware or probe()
    model, chosen = _chosen(settings, hardware, progress)
    header = read_header(model, complete=complete)
    layout = layout_of(header, complete=complete)
    footprint = footprint_of(header, layout)
    wanted = wanted_of(settings, header, cache_types)
    router_map, notes = _router_map(settings, layout)
    asked, calibration = settings, _calibration(settings, hardware, layout)
    if calibration is not None:
        settings = calibrated(settings, calibration)
        notes = [*notes, _found(calibration, asked, settings)]
    plan = planner.plan_of(layout, footprint, hardware, wanted)
    if not settings.pager:
        plan = planner.split_of(plan, layout, footprint, wanted.context)
    return Served(
        asked=asked,
        calibration=calibration,
        settings=settings,
        model=model,
        header=header,
        layout=layout,
        footprint=footprint,
        hardware=hardware,
        wanted=wanted,
        plan=plan,
        router_map=router_map,
        classifier=classifier_of(settings),
        notes=(*chosen, *notes),
    )


def context_length(settings: Settings, header: GgufHeader) -> int:
    """Tokens of context of one slot; the KV cache of a model's full context can exceed its experts."""
    asked = settings.context_length
    return asked if asked is not None else min(header.context_length or DEFAULT_CONTEXT, DEFAULT_CONTEXT)


def wanted_of(
    settings: Settings, header: GgufHeader, cache_types: tuple[str, str] = ("f16", "f16")
) -> Wanted:
    """What ``settings`` ask of the planner. Raises ConfigError."""
    slots = settings.slots or 1
    return Wanted(
        gpu=settings.gpu,
        context=Context(
            context_length(settings, header) * slots,
            slots,
            *cache_types,
            sequences=settings.slots or planner.SEQUENCES,
        ),
        ram_budget=parse_budget(settings.ram_budget) if settings.ram_budget else None,
        vram_budget_bytes=parse_vram_budget(settings.vram_budget) if settings.vram_budget else None,
    )


def plan_of(settings: Settings, header: GgufHeader, layout: ModelLayout, hardware: Hardware) -> Plan:
    """The memory plan that ``settings`` ask for. Raises ConfigError."""
    return planner.plan_of(layout, footprint_of(header, layout), hardware, wanted_of(settings, header))


def case_of(served: Served, batch: int | None = None) -> Case:
    """``served`` as a case to forecast; ``batch``: tokens computed at once, where that was asked for."""
    return Case(
        layout=served.layout,
        footprint=served.footprint,
        hardware=served.hardware,
        wanted=served.wanted,
        bandwidths=_measured(assumed(served.hardware), served.calibration),
        router_map=_with_learned(served),
        pager=served.settings.pager,
        batch=batch,
    )


def _with_learned(served: Served) -> RouterMap | None:
    """The map, with what was learned from traffic on this port; that may be all that there is."""
    settings, fingerprint = served.settings, served.layout.fingerprint
    if not (settings.pager and settings.learn and fingerprint):
        return served.router_map
    paths = instance_paths(settings.runtime_dir, settings.state_dir, settings.port)
    path = learned_path(paths.state, fingerprint)
    learner = Learner(ModelKey.of(served.layout), served.router_map, settings.learn_half_life_tokens)
    try:
        learner.restore(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError, RouterMapError):
        return served.router_map  # whoever serves says what is wrong with it
    return learner.merged()


def _calibration(settings: Settings, hardware: Hardware, layout: ModelLayout) -> Calibration | None:
    """What was found of this model here; None where nothing was, or it is not to be used."""
    if not settings.calibrated or not layout.fingerprint:
        return None
    path = calibration_path(settings.state_dir, hardware, layout.fingerprint, gpu=settings.gpu)
    return read_calibration(path, hardware, layout.fingerprint)


def _found(calibration: Calibration, asked: Settings, settings: Settings) -> str:
    """What a calibration changes, in words."""
    best = calibration.choice.trial
    used = "1 thread" if settings.threads == 1 else f"{settings.threads} threads"
    if settings.thread_wait == "sleep":
        used += " that sleep while they wait"
    if asked.pager and not settings.pager:
        used += ", no pager, since stock llama.cpp is faster here"
    return f"Tuned on {calibration.date[:10]} ({best.decode_per_s:.1f} tokens/s then): {used}."


def _measured(bandwidths: Bandwidths, calibration: Calibration | None) -> Bandwidths:
    """``bandwidths`` with those that were measured in their places."""
    found = calibration.bandwidths_bytes_per_s if calibration is not None else {}

    def rate(name: str, assumed: Rate) -> Rate:
        value = found.get(name)
        return assumed if value is None else Rate(value, "measured by moe-proxy tune")

    return replace(
        bandwidths,
        vram=rate("vram", bandwidths.vram),
        link=rate("link", bandwidths.link),
        ram=rate("ram", bandwidths.ram),
        disk=rate("disk", bandwidths.disk),
    )


def _router_map(settings: Settings, layout: ModelLayout) -> tuple[RouterMap | None, list[str]]:
    """The map that was asked for, or the shipped one of this very model, with warnings about it."""
    if settings.router_map is not None:
        asked = load_any(settings.router_map, ModelKey.of(layout))
        if not layout.fingerprint:
            # A header alone cannot tell; everything else must agree.
            layout = replace(layout, fingerprint=asked.model.fingerprint)
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
