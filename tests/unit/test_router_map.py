"""Router maps: strict reading, readable writing, and only for the model that they were made for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_proxy.errors import RouterMapError
from moe_proxy.model.layout import ModelLayout
from moe_proxy.routing.router_map import DomainCounts, ModelKey, RouterMap, check, dump, load, parse

KEY = ModelKey("qwen3moe", "tiny", "ab" * 32, (1, 3), 4, 2)
LAYOUT = ModelLayout("qwen3moe", "tiny", (1, 3), 4, 2, {1: 64, 3: 64}, 100, "ab" * 32)
MAP = RouterMap(
    KEY,
    {"tool": "moe-proxy", "version": "1", "source": "builtin", "tokens": 30},
    {
        "codegen": DomainCounts(10, {1: (10, 5, 3, 2), 3: (5, 5, 5, 5)}),
        "größe 中": DomainCounts(20, {1: (0, 20, 10, 10), 3: (8, 12, 10, 10)}),
    },
)


def document() -> dict[str, Any]:
    """The map as decoded JSON."""
    decoded: dict[str, Any] = json.loads(dump(MAP))
    return decoded


def test_the_format() -> None:
    """The members of the file are those of the format, with counts by layer."""
    found = document()
    assert found["format"] == "moe-router-map/1"
    assert found["model"] == {
        "architecture": "qwen3moe",
        "name": "tiny",
        "fingerprint": "ab" * 32,
        "layers": [1, 3],
        "experts": 4,
        "experts_used": 2,
    }
    assert found["made"]["tokens"] == 30
    assert found["domains"]["codegen"] == {"tokens": 10, "layers": {"1": [10, 5, 3, 2], "3": [5, 5, 5, 5]}}


def test_one_line_per_layer() -> None:
    """One line per layer, so that a diff can be read."""
    rows = [line.strip() for line in dump(MAP).splitlines() if line.strip().startswith('"1"')]
    assert rows == ['"1": [10, 5, 3, 2],', '"1": [0, 20, 10, 10],']


counts = st.integers(0, 2**53 - 1)
rows = st.tuples(counts, counts, counts, counts)


@given(
    domains=st.dictionaries(
        st.text(min_size=1),
        st.builds(lambda n, a, b: DomainCounts(n, {1: a, 3: b}), counts, rows, rows),
        max_size=3,
    ),
    made=st.dictionaries(st.text(), st.text() | st.integers() | st.booleans() | st.none(), max_size=3),
)
def test_round_trip(domains: dict[str, DomainCounts], made: dict[str, object]) -> None:
    """What is written is read back, whatever the labels and counts."""
    router_map = RouterMap(KEY, made, domains)
    assert parse(dump(router_map), "test") == router_map


def test_counts_as_arrays() -> None:
    """Counts of a domain have the shape (MoE layers, experts)."""
    assert MAP.counts["codegen"].tolist() == [[10, 5, 3, 2], [5, 5, 5, 5]]


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    """The map's text after one change."""
    found = document()
    change(found)
    return json.dumps(found)


LAYER = "domains.codegen.layers"
MALFORMED: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    ("format", lambda d: d.update(format="moe-router-map/2"), "is not 'moe-router-map/1'"),
    ("format", lambda d: d.pop("format"), "is missing"),
    ("extra", lambda d: d.update(extra=1), "is not a key of the format"),
    ("model", lambda d: d.update(model=[]), "is not an object"),
    ("model.architecture", lambda d: d["model"].update(architecture=3), "is not a text"),
    ("model.fingerprint", lambda d: d["model"].update(fingerprint="AB" * 32), "64 lower-case hex digits"),
    ("model.layers", lambda d: d["model"].update(layers=[]), "is not a list of layers"),
    ("model.layers", lambda d: d["model"].update(layers=[3, 1]), "do not ascend"),
    ("model.layers", lambda d: d["model"].update(layers=[1, 1]), "do not ascend"),
    ("model.layers[0]", lambda d: d["model"].update(layers=[-1, 1]), "is not between 0"),
    ("model.experts", lambda d: d["model"].update(experts=True), "is not a whole number"),
    ("model.experts_used", lambda d: d["model"].update(experts_used=0), "not between 1"),
    ("model.experts_used", lambda d: d["model"].update(experts_used=5), "not between 1"),
    ("made", lambda d: d.update(made="me"), "is not an object"),
    ("domains", lambda d: d.update(domains=[1]), "is not an object"),
    ("domains", lambda d: d["domains"].update({"": d["domains"]["codegen"]}), "a label is empty"),
    ("domains.codegen", lambda d: d["domains"].update(codegen=7), "is not an object"),
    ("domains.codegen.tokens", lambda d: d["domains"]["codegen"].update(tokens=1.0), "not a whole number"),
    ("domains.codegen.tokens", lambda d: d["domains"]["codegen"].pop("tokens"), "is missing"),
    (
        f"{LAYER}.2",
        lambda d: d["domains"]["codegen"]["layers"].update({"2": [0] * 4}),
        "not one of the model's",
    ),
    (
        f"{LAYER}.01",
        lambda d: d["domains"]["codegen"]["layers"].update({"01": [0] * 4}),
        "not one of the model's",
    ),
    (
        f"{LAYER}.x",
        lambda d: d["domains"]["codegen"]["layers"].update({"x": [0] * 4}),
        "not one of the model's",
    ),
    (f"{LAYER}.3", lambda d: d["domains"]["codegen"]["layers"].pop("3"), "is missing"),
    (f"{LAYER}.1", lambda d: d["domains"]["codegen"]["layers"].update({"1": [1] * 5}), "5 counts"),
    (f"{LAYER}.1", lambda d: d["domains"]["codegen"]["layers"].update({"1": 5}), "the model has 4 experts"),
    (
        f"{LAYER}.1[2]",
        lambda d: d["domains"]["codegen"]["layers"].update({"1": [1, 1, -1, 1]}),
        "not between 0",
    ),
    (
        f"{LAYER}.1[0]",
        lambda d: d["domains"]["codegen"]["layers"].update({"1": [True, 1, 1, 1]}),
        "whole number",
    ),
    (
        f"{LAYER}.1[3]",
        lambda d: d["domains"]["codegen"]["layers"].update({"1": [1, 1, 1, "1"]}),
        "whole number",
    ),
    (f"{LAYER}.1[3]", lambda d: d["domains"]["codegen"]["layers"].update({"1": [1, 1, 1, 2**53]}), "2^53"),
]


@pytest.mark.parametrize(("key", "change", "reason"), MALFORMED)
def test_malformed_maps_are_refused(
    key: str, change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    """A malformed map is refused with file, key and reason."""
    with pytest.raises(RouterMapError) as caught:
        parse(changed(change), "file.json")
    assert f"file.json: {key}: " in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("{", "line 1: not JSON"),
        ("[]", "is not an object"),
        ('{"format": NaN}', "NaN"),
        ('{"format": "a",\n "format": "b"}', "format: stands twice"),
        ('{"format": ' + "9" * 5000 + "}", "thousands of digits"),
        ("[" * 100_000, "nested too deeply"),
        (dump(MAP).replace('"tokens": 10', '"tokens": Infinity'), "Infinity"),
        (dump(MAP).replace('"3": [5', '"1": [5', 1), "1: stands twice"),
    ],
)
def test_texts_that_are_no_map(text: str, words: str) -> None:
    """What is not JSON, or JSON that readers understand differently, is refused in one line."""
    with pytest.raises(RouterMapError, match=words) as caught:
        parse(text, "file.json")
    assert "file.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@given(
    st.text() | st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists).map(json.dumps)
)
def test_no_text_raises_anything_else(text: str) -> None:
    """Whatever the text is, the error is ours."""
    with pytest.raises(RouterMapError):
        parse(text, "file.json")


def places(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The paths of all values in a decoded document but the whole, and but what ``made`` says freely."""
    found = [path] if path else []
    if isinstance(value, dict) and path != ("made",):
        found += [place for name, inner in value.items() for place in places(inner, (*path, name))]
    elif isinstance(value, list):
        found += [place for number, inner in enumerate(value) for place in places(inner, (*path, number))]
    return found


@given(
    st.sampled_from(places(document())),
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.integers(max_value=-1) | st.just([[]]),
)
def test_any_misplaced_value_is_refused(place: tuple[str | int, ...], value: object) -> None:
    """Malformed maps of every kind are refused with file, key and reason, whichever value is wrong."""
    broken = document()
    inner: Any = broken
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    with pytest.raises(RouterMapError) as caught:
        parse(json.dumps(broken), "file.json")
    # A list is named as a whole where its elements cannot be told apart.
    names = [step for step in place if isinstance(step, str)]
    assert f"file.json: {'.'.join(names)}" in str(caught.value)


@given(st.sampled_from([place for place in places(document()) if isinstance(place[-1], str)]))
def test_any_missing_key_is_refused(place: tuple[str | int, ...]) -> None:
    """A map that lacks a key is refused with its name; a domain may be missing, it is one less."""
    broken = document()
    inner: Any = broken
    for step in place[:-1]:
        inner = inner[step]
    del inner[place[-1]]
    if len(place) == 2 and place[0] == "domains":
        assert len(parse(json.dumps(broken), "file.json").domains) == 1
        return
    with pytest.raises(RouterMapError) as caught:
        parse(json.dumps(broken), "file.json")
    assert f"file.json: {'.'.join(map(str, place))}: is missing" in str(caught.value)


@given(st.integers(0, len(dump(MAP)) - 2))
def test_a_cut_map_is_refused(length: int) -> None:
    """Half a map is no map."""
    with pytest.raises(RouterMapError):
        parse(dump(MAP)[:length], "file.json")


def test_loading(tmp_path: Path) -> None:
    """A file is read as UTF-8, with or without a byte order mark; what is no such file is said to be that."""
    path = tmp_path / "map.json"
    for start in (b"", b"\xef\xbb\xbf"):
        path.write_bytes(start + dump(MAP).encode())
        assert load(path) == MAP
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RouterMapError, match="not UTF-8"):
        load(path)
    with pytest.raises(RouterMapError, match="does not exist"):
        load(tmp_path / "none.json")
    with pytest.raises(RouterMapError, match="is a directory"):
        load(tmp_path)


def test_the_map_of_this_model() -> None:
    """A map of this model is accepted, also under another name of the model."""
    assert check(MAP, LAYOUT) == []
    assert check(MAP, replace(LAYOUT, name="renamed")) == []


@pytest.mark.parametrize(
    "other",
    [
        replace(LAYOUT, name="other", fingerprint="cd" * 32),
        replace(LAYOUT, name="other", architecture="mixtral"),
        replace(LAYOUT, name="other", experts=8),
        replace(LAYOUT, name="other", experts_used=1),
        replace(LAYOUT, name="other", layers=(1, 2)),
    ],
)
def test_the_map_of_another_model(other: ModelLayout) -> None:
    """A map of another model is refused by name: both are named."""
    with pytest.raises(RouterMapError, match=r"of 'tiny' .* is 'other'"):
        check(MAP, other)


def test_constant_routing_is_reported() -> None:
    """A layer with the same few experts for every token is reported: the mark of broken logits."""
    constant = replace(MAP, domains={"math": DomainCounts(50, {1: (50, 0, 50, 0), 3: (25, 25, 25, 25)})})
    assert [warning.split(" routes")[0] for warning in check(constant, LAYOUT)] == ["layer 1"]


def test_maps_without_counts_are_reported() -> None:
    """A map that cannot make a prior is accepted with a warning."""
    assert "no domain" in check(replace(MAP, domains={}), LAYOUT)[0]
    empty = replace(MAP, domains={"math": DomainCounts(0, {1: (0,) * 4, 3: (1,) * 4})})
    assert check(empty, LAYOUT) == ["layer 1 of the router map has no counts"]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """A pipe or a device is refused at once: opening it could wait, and reading it not end, for ever."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(RouterMapError, match="is no regular file"):
            load(path)


def test_a_file_far_too_large_is_not_read(tmp_path: Path) -> None:
    """A model named by mistake is not read into memory."""
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(RouterMapError, match="too many for a map"):
        load(path)
