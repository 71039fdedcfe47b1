"""Owns reading and writing the forms of expert lists that other tools use. It never guesses what a line
means.

======== =========================================================================================
text     ``<layer> <id> <id> …``, one layer a line; ``#`` comments; ``# EXPERT_TOTAL n``; repeated layers
merge layers   ``{"layers": {"0": [id, …]}}``
digits   ``{"0": [id, …]}``
domains  ``{"domains": {d: {"per_layer_domain_preferred" or "per_layer_top": {"0": [id, …]}}}}``
======== =========================================================================================

All of them are ranked lists without counts and without a model. They become counts by one rule: the id
at rank r of n (from 0) counts ``RANK_COUNT * (n - r)``, every other id 0. A layer that a list does not
name has no counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from moe_proxy.errors import RouterMapError
from moe_proxy.routing.router_map import FORMAT, DomainCounts, ModelKey, RouterMap, parse, read

FORMS = ("text", "layers", "digits", "domains")
RANK_COUNT = 100
"""Counts per rank: enough that add-one smoothing does not drown a short list."""
ONE_DOMAIN = "all"
"""Label of a list that names no domain."""

_LISTS = ("per_layer_domain_preferred", "per_layer_top")
_TOTAL = re.compile(r"#\s*EXPERT_TOTAL\s+(\S+)\s*")
_NUMBER = re.compile(r"[0-9]{1,9}")

Ranked = dict[int, list[int]]


def load_any(path: Path, key: ModelKey, *, domain: str = ONE_DOMAIN) -> RouterMap:
    """A router map from a file of any known form; ``key`` is the model that foreign forms are taken to
    belong to.

    ``domain`` labels a list that names none. Raises RouterMapError with file, line or key, and reason.
    """
    return parse_any(read(path), str(path), key, domain=domain)


def parse_any(text: str, source: str, key: ModelKey, *, domain: str = ONE_DOMAIN) -> RouterMap:
    """As ``load_any``, of a text that ``source`` names in messages."""
    reader = _Reader(source, key)
    if not text.lstrip().startswith(("{", "[")):
        return _router_map(key, {domain: reader.text(text)}, source)
    document = reader.decode(text)
    if isinstance(document, dict) and "format" in document:
        return parse(text, source)
    if isinstance(document, dict) and "domains" in document:
        return _router_map(key, reader.domains(document), source)
    if isinstance(document, dict) and "layers" in document:
        reader.only(document, "", ("layers",))
        return _router_map(key, {domain: reader.layers(document["layers"], "layers")}, source)
    if isinstance(document, dict) and document and all(_NUMBER.fullmatch(name) for name in document):
        return _router_map(key, {domain: reader.layers(document, "")}, source)
    return reader.fail("", f"it is neither of the format {FORMAT} nor one of the forms {', '.join(FORMS)}")


def export(router_map: RouterMap, form: str, *, domain: str | None = None, top_k: int | None = None) -> str:
    """A map in a foreign form: ids by falling count, those that were never picked left out.

    ``domain`` chooses the one that the single-domain forms hold; None: the sum of all. Raises
    RouterMapError for an unknown domain.
    """
    if form == "domains":
        ranked = {label: _ranked(router_map, label, top_k) for label in router_map.domains}
        body = {label: {"per_layer_top": _named(lists)} for label, lists in ranked.items()}
        return json.dumps({"domains": body}, ensure_ascii=False, indent=1) + "\n"
    lists = _ranked(router_map, domain, top_k)
    if form == "text":
        lines = [" ".join(map(str, (layer, *ids))) for layer, ids in lists.items() if ids]
        return (
            "\n".join((f"# {router_map.model.name}", f"# EXPERT_TOTAL {router_map.model.experts}", *lines))
            + "\n"
        )
    named = _named(lists)
    return json.dumps({"layers": named} if form == "layers" else named, indent=1) + "\n"


def _named(lists: Ranked) -> dict[str, list[int]]:
    return {str(layer): ids for layer, ids in lists.items()}


def _ranked(router_map: RouterMap, domain: str | None, top_k: int | None) -> Ranked:
    if domain is not None and domain not in router_map.domains:
        raise RouterMapError(
            f"the map holds no domain {domain!r}", f"it holds {', '.join(router_map.domains) or 'none'}"
        )
    shape = (len(router_map.model.layers), router_map.model.experts)
    chosen = [domain] if domain is not None else list(router_map.domains)
    counts = sum((router_map.counts[label] for label in chosen), np.zeros(shape, np.int64))
    lists = {}
    for layer, row in zip(router_map.model.layers, counts, strict=True):
        order = np.argsort(-row, kind="stable")[:top_k]
        lists[layer] = [int(expert) for expert in order if row[expert] > 0]
    return lists


def _router_map(key: ModelKey, domains: Mapping[str, Ranked], source: str) -> RouterMap:
    counted = {}
    for label, lists in domains.items():
        rows = {}
        for layer in key.layers:
            row = [0] * key.experts
            ids = lists.get(layer, [])
            for rank, expert in enumerate(ids):
                row[expert] = RANK_COUNT * (len(ids) - rank)
            rows[layer] = tuple(row)
        picks = max(sum(row) for row in rows.values())
        counted[label] = DomainCounts(-(-picks // key.experts_used), rows)
    made = {"tool": "moe-proxy map convert", "source": Path(source).name, "ranked": True}
    return RouterMap(key, {**made, "tokens": sum(d.tokens for d in counted.values())}, counted)


class _Reader:
    """Checks a foreign form against the model, naming the line or key at fault."""

    def __init__(self, source: str, key: ModelKey) -> None:
        self._source = source
        self._key = key

    def fail(self, where: str, reason: str) -> NoReturn:
        place = f"{self._source}: {where}" if where else self._source
        raise RouterMapError(f"{place}: {reason}", "see moe-proxy map convert --help for the forms")

    def text(self, text: str) -> Ranked:
        lists: Ranked = {}
        for number, line in enumerate(text.splitlines(), 1):
            where = f"line {number}"
            total = _TOTAL.fullmatch(line.strip())
            if total and total[1] != str(self._key.experts):
                self.fail(where, f"EXPERT_TOTAL is {total[1]} and the model has {self._key.experts} experts")
            words = line.split("#", 1)[0].split()
            if not words:
                continue
            for word in words:
                if not (word.isascii() and _NUMBER.fullmatch(word)):
                    self.fail(where, f"{word[:20]!r} is not a number")
            layer, ids = int(words[0]), [int(word) for word in words[1:]]
            self.check_layer(layer, where)
            if not ids:
                self.fail(where, f"layer {layer} has no experts")
            known = lists.setdefault(layer, [])
            known.extend(expert for expert in dict.fromkeys(self.checked(ids, where)) if expert not in known)
        if not lists:
            self.fail("", "holds no layer")
        return lists

    def decode(self, text: str) -> Any:
        def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
            found: dict[str, object] = {}
            for name, value in pairs:
                if name in found:
                    self.fail(name, "stands twice in one object")
                found[name] = value
            return found

        try:
            return json.loads(text, object_pairs_hook=unique)
        except json.JSONDecodeError as error:
            self.fail(f"line {error.lineno}", f"not JSON ({error.msg})")
        except (RecursionError, ValueError):
            self.fail("", "nested too deeply, or holds a number of thousands of digits")

    def domains(self, document: dict[str, Any]) -> dict[str, Ranked]:
        domains = document["domains"]
        if not isinstance(domains, dict) or not domains:
            self.fail("domains", "is not an object with domains")
        found = {}
        for label, body in domains.items():
            where = f"domains.{label}"
            names = [name for name in _LISTS if isinstance(body, dict) and name in body]
            if not label or not names:
                self.fail(where, f"has none of {' and '.join(_LISTS)}")
            found[label] = self.layers(body[names[0]], f"{where}.{names[0]}")
        return found

    def layers(self, value: object, where: str) -> Ranked:
        if not isinstance(value, dict) or not value:
            self.fail(where, "is not an object with layers")
        lists: Ranked = {}
        for name, ids in value.items():
            place = f"{where}.{name}" if where else name
            if not _NUMBER.fullmatch(name):
                self.fail(place, f"{name[:20]!r} is not the number of a layer")
            self.check_layer(int(name), place)
            if not isinstance(ids, list) or not all(type(expert) is int for expert in ids):
                self.fail(place, "is not a list of expert ids")
            if int(name) in lists:
                self.fail(place, "the layer stands twice")
            lists[int(name)] = self.checked(ids, place)
            if len(set(ids)) != len(ids):
                self.fail(place, "names an expert twice")
        return lists

    def only(self, document: Mapping[str, object], where: str, names: Sequence[str]) -> None:
        for name in document:
            if name not in names:
                self.fail(f"{where}{name}", "is not a key of this form")

    def check_layer(self, layer: int, where: str) -> None:
        if layer not in self._key.layers:
            first, last = self._key.layers[0], self._key.layers[-1]
            self.fail(where, f"layer {layer} is not one of the model's MoE layers, {first} to {last}")

    def checked(self, ids: list[int], where: str) -> list[int]:
        for expert in ids:
            if not 0 <= expert < self._key.experts:
                self.fail(where, f"expert {expert} is not between 0 and {self._key.experts - 1}")
        return ids
