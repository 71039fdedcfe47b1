"""Owns the one definition of a router map: picks of each expert, per domain and layer, in one model.

A map holds counts; everything else (coverage, overlap, priors) is derived from them. It never guesses: a text
that is not exactly a map is refused with the key and the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from moe_proxy.errors import RouterMapError
from moe_proxy.model.layout import ModelLayout

FORMAT = "moe-router-map/1"
_HINT = f"a router map has the format {FORMAT}; moe-proxy map convert reads other forms"

_MAX_COUNT = 2**53 - 1  # what every JSON reader keeps exactly
_MAX_BYTES = 64 << 20  # far over the map of any model; what is larger was named by mistake
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_LAYER = re.compile(r"0|[1-9][0-9]{0,5}")
_CONSTANT_SHARE = 0.99
"""A layer whose ``experts_used`` busiest experts take more of its picks than this routes all tokens alike."""


@dataclass(frozen=True)
class ModelKey:
    """The model that a map belongs to. ``layers`` are its MoE layers; dense ones have no row."""

    architecture: str
    name: str
    fingerprint: str
    layers: tuple[int, ...]
    experts: int
    experts_used: int

    @classmethod
    def of(cls, layout: ModelLayout) -> ModelKey:
        """The key of a model that is at hand."""
        return cls(
            layout.architecture,
            layout.name,
            layout.fingerprint,
            layout.layers,
            layout.experts,
            layout.experts_used,
        )


@dataclass(frozen=True)
class DomainCounts:
    """Picks of each expert by layer, over ``tokens`` tokens of one domain."""

    tokens: int
    layers: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class RouterMap:
    """Counts of one model; ``made`` says by what and from what."""

    model: ModelKey
    made: Mapping[str, object]
    domains: Mapping[str, DomainCounts]

    @cached_property
    def counts(self) -> Mapping[str, npt.NDArray[np.int64]]:
        """Counts of each domain as an array of shape (MoE layers, experts)."""
        return {
            label: np.array([domain.layers[layer] for layer in self.model.layers], np.int64)
            for label, domain in self.domains.items()
        }

    @cached_property
    def pick_probabilities(self) -> npt.NDArray[np.float64]:
        """``p_d(l, e)``: how likely one token picks expert ``e`` in layer ``l``; (domains, layers, experts).

        Add-one smoothing of the picks (Laplace), times the picks that one token makes, so that a layer
        without counts is uniform. Domains stand in the order of ``domains``.
        """
        counts = np.array(list(self.counts.values()), np.float64)
        counts = counts.reshape(-1, len(self.model.layers), self.model.experts)
        smoothed = (counts + 1.0) / (counts.sum(axis=2, keepdims=True) + self.model.experts)
        probabilities: npt.NDArray[np.float64] = np.minimum(self.model.experts_used * smoothed, 1.0)
        return probabilities


def load(path: Path) -> RouterMap:
    """Read a map file. Raises RouterMapError for a file that cannot be read or is no map."""
    return parse(read(path), str(path))


def read(path: Path) -> str:
    """The text of a map file. Raises RouterMapError for a file that cannot be read."""
    try:
        if path.is_dir():
            raise RouterMapError(f"{path} is a directory", "name the map file in it")
        # Asked before it is opened: opening a pipe waits for a writer, and a device may never end.
        if path.exists() and not path.is_file():
            raise RouterMapError(f"{path} is no regular file", "give a router map")
        size_bytes = path.stat().st_size
        if size_bytes > _MAX_BYTES:
            raise RouterMapError(f"{path} has {size_bytes} bytes, too many for a map", "give a router map")
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise RouterMapError(f"{path} does not exist", "check the path of the router map") from None
    except OSError as error:
        raise RouterMapError(f"{path} cannot be read ({error.strerror})", "check its rights") from error
    except UnicodeDecodeError as error:
        raise RouterMapError(f"{path} is not UTF-8 text (byte {error.start})", "give a router map") from None


def parse(text: str, source: str) -> RouterMap:
    """Read a map from ``text``;

    ``source`` names it in messages. Raises RouterMapError naming the key at fault.
    """
    return _Parser(source).whole(text)


def dump(router_map: RouterMap) -> str:
    """Text of a map: one line per layer, so that a diff can be read. ``parse`` gives the same map back."""

    def text(value: object) -> str:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)

    key = router_map.model
    model = {
        "architecture": key.architecture,
        "name": key.name,
        "fingerprint": key.fingerprint,
        "layers": list(key.layers),
        "experts": key.experts,
        "experts_used": key.experts_used,
    }
    domains = []
    for label, domain in router_map.domains.items():
        rows = ",\n".join(
            f"   {text(str(layer))}: {text(list(domain.layers[layer]))}" for layer in key.layers
        )
        domains.append(f'  {text(label)}: {{"tokens": {domain.tokens}, "layers": {{\n{rows}}}}}')
    return (
        f'{{"format": {text(FORMAT)},\n "model": {text(model)},\n "made": {text(dict(router_map.made))},\n'
        f' "domains": {{' + ("\n" + ",\n".join(domains) if domains else "") + "}}\n"
    )


def check(router_map: RouterMap, layout: ModelLayout) -> list[str]:
    """Warnings about a map that belongs to the model of ``layout``.

    Raises RouterMapError for another model's map.
    """
    of_map, of_model = router_map.model, ModelKey.of(layout)
    for what in ("architecture", "layers", "experts", "experts_used", "fingerprint"):
        theirs, ours = getattr(of_map, what), getattr(of_model, what)
        if theirs != ours:
            raise RouterMapError(
                f"the router map is of {of_map.name!r} ({what} {_short(theirs)}) and the model is"
                f" {of_model.name!r} ({what} {_short(ours)})",
                "use the map of this model, make one with `moe-proxy collect`, or start without a map",
            )
    return doubts(router_map)


def doubts(router_map: RouterMap) -> list[str]:
    """What makes a well-formed map of little use, one warning each; whichever model it is of."""
    of_map = router_map.model
    if not router_map.domains:
        return ["the router map holds no domain, so there is no prior"]
    total = sum(router_map.counts.values(), np.zeros((len(of_map.layers), of_map.experts), np.int64))
    warnings = []
    for layer, row in zip(of_map.layers, total, strict=True):
        picks = int(row.sum())
        busiest = int(np.sort(row)[-of_map.experts_used :].sum())
        if picks == 0:
            warnings.append(f"layer {layer} of the router map has no counts")
        elif of_map.experts_used < of_map.experts and busiest > _CONSTANT_SHARE * picks:
            warnings.append(
                f"layer {layer} routes every token to the same {of_map.experts_used} experts"
                f" ({busiest} of {picks} picks): the mark of broken router logits"
            )
    return warnings


def _short(value: object) -> str:
    if isinstance(value, tuple):
        return f"{value[0]}..{value[-1]} ({len(value)})" if value else "none"
    return str(value)[:12]


class _Parser:
    """Checks a decoded JSON value against the format, with the path of the key in every message."""

    def __init__(self, source: str) -> None:
        self.source = source

    def fail(self, where: str, reason: str) -> NoReturn:
        place = f"{self.source}: {where}" if where else self.source
        raise RouterMapError(f"{place}: {reason}", _HINT)

    def whole(self, text: str) -> RouterMap:
        top = self.members(self.decode(text), "", ("format", "model", "made", "domains"))
        if top["format"] != FORMAT:
            self.fail("format", f"{_quoted(top['format'])} is not {FORMAT!r}")
        model = self.model(top["model"])
        made = self.mapping(top["made"], "made")
        domains = {
            label: self.domain(value, f"domains.{label}", model)
            for label, value in self.mapping(top["domains"], "domains").items()
        }
        if "" in domains:
            self.fail("domains", "a label is empty")
        return RouterMap(model, made, domains)

    def decode(self, text: str) -> object:
        def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
            found: dict[str, object] = {}
            for key, value in pairs:
                if key in found:
                    self.fail(key, "stands twice in one object")
                found[key] = value
            return found

        def refuse(constant: str) -> NoReturn:
            self.fail("", f"{constant} is not a number of JSON")

        try:
            decoded: object = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
        except json.JSONDecodeError as error:
            self.fail(f"line {error.lineno}", f"not JSON ({error.msg})")
        except RecursionError:
            self.fail("", "nested too deeply")
        except ValueError:  # an integer of more digits than Python converts
            self.fail("", "holds a number of thousands of digits")
        return decoded

    def mapping(self, value: object, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.fail(where, f"{_quoted(value)} is not an object")
        return value

    def members(self, value: object, where: str, names: Collection[str]) -> dict[str, Any]:
        members = self.mapping(value, where)
        prefix = f"{where}." if where else ""
        for name in names:
            if name not in members:
                self.fail(f"{prefix}{name}", "is missing")
        for name in members:
            if name not in names:
                self.fail(f"{prefix}{name}", "is not a key of the format")
        return members

    def model(self, value: object) -> ModelKey:
        names = ("architecture", "name", "fingerprint", "layers", "experts", "experts_used")
        model = self.members(value, "model", names)
        for name in ("architecture", "name", "fingerprint"):
            if not isinstance(model[name], str):
                self.fail(f"model.{name}", f"{_quoted(model[name])} is not a text")
        if not _FINGERPRINT.fullmatch(model["fingerprint"]):
            self.fail("model.fingerprint", f"{_quoted(model['fingerprint'])} is not 64 lower-case hex digits")
        layers = model["layers"]
        if not isinstance(layers, list) or not layers:
            self.fail("model.layers", f"{_quoted(layers)} is not a list of layers")
        numbers = tuple(self.count(layer, f"model.layers[{i}]") for i, layer in enumerate(layers))
        if any(low >= high for low, high in pairwise(numbers)):
            self.fail("model.layers", "the layers do not ascend")
        experts = self.count(model["experts"], "model.experts")
        used = self.count(model["experts_used"], "model.experts_used")
        if not 1 <= used <= experts:
            self.fail("model.experts_used", f"{used} is not between 1 and the number of experts, {experts}")
        return ModelKey(model["architecture"], model["name"], model["fingerprint"], numbers, experts, used)

    def domain(self, value: object, where: str, model: ModelKey) -> DomainCounts:
        members = self.members(value, where, ("tokens", "layers"))
        rows: dict[int, tuple[int, ...]] = {}
        for key, row in self.mapping(members["layers"], f"{where}.layers").items():
            place = f"{where}.layers.{key}"
            if not _LAYER.fullmatch(key) or int(key) not in model.layers:
                self.fail(place, f"{key!r} is not one of the model's layers, {_short(model.layers)}")
            if not isinstance(row, list) or len(row) != model.experts:
                length = f"{len(row)} counts" if isinstance(row, list) else _quoted(row)
                self.fail(place, f"{length}, and the model has {model.experts} experts")
            rows[int(key)] = tuple(self.count(count, f"{place}[{e}]") for e, count in enumerate(row))
        for layer in model.layers:
            if layer not in rows:
                self.fail(f"{where}.layers.{layer}", "is missing")
        tokens = self.count(members["tokens"], f"{where}.tokens")
        return DomainCounts(tokens, {layer: rows[layer] for layer in model.layers})

    def count(self, value: object, where: str) -> int:
        if type(value) is not int:
            self.fail(where, f"{_quoted(value)} is not a whole number")
        if not 0 <= value <= _MAX_COUNT:
            self.fail(where, f"{_quoted(value)} is not between 0 and 2^53 - 1")
        return value


def _quoted(value: object) -> str:
    """A value for a message, cut to a readable length."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
