"""Foreign forms of expert lists: read strictly, written faithfully."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_proxy.errors import RouterMapError
from moe_proxy.routing.foreign import FORMS, export, load_any, parse_any
from moe_proxy.routing.router_map import dump
from tests.unit.test_router_map import KEY, MAP

RANKED = {1: (200, 0, 100, 0), 3: (0, 0, 0, 100)}
LISTS = {"1": [0, 2], "3": [3]}


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("# a comment\n# EXPERT_TOTAL 4\n1 0 2 # the rest\n\n3 3\n", "all"),
        ("1 0\n3 3\n1 2 0\n", "all"),
        (json.dumps({"layers": LISTS}), "all"),
        (json.dumps(LISTS), "all"),
        (json.dumps({"domains": {"math": {"per_layer_top": LISTS}}}), "math"),
        (json.dumps({"domains": {"math": {"per_layer_domain_preferred": LISTS, "other": 1}}}), "math"),
    ],
)
def test_ranked_lists_become_counts(text: str, label: str) -> None:
    """The id at rank r of n counts 100 (n - r); repeated layers of the text form merge."""
    found = parse_any(text, "x", KEY)
    assert {name: dict(counts.layers) for name, counts in found.domains.items()} == {label: RANKED}
    assert found.model == KEY


def test_our_own_form_is_read_too(tmp_path: Path) -> None:
    """--router-map takes any of them."""
    (tmp_path / "map.json").write_text(dump(MAP), encoding="utf-8")
    assert load_any(tmp_path / "map.json", KEY) == MAP


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("1 0\nx 1\n", "line 2"),
        ("1 0\n3 1 -2\n", "line 2"),
        ("1 0\n3 1.5\n", "line 2"),
        ("1 0\n\n2 1\n", "line 3"),
        ("1 0 4\n", "line 1"),
        ("1\n", "line 1"),
        ("1 ٣\n", "line 1"),
        ("# EXPERT_TOTAL 8\n1 0\n", "line 1"),
        ("# EXPERT_TOTAL x\n1 0\n", "line 1"),
        ("# nothing\n", "no layer"),
        ("", "no layer"),
        ("{\n\n", "line 3"),
        ("[]", "forms"),
        ("{}", "forms"),
        ('{"layers": {}}', "layers"),
        ('{"layers": {"1": [0]}, "x": 1}', "x"),
        ('{"layers": {"a": [0]}}', "layers.a"),
        ('{"layers": {"2": [0]}}', "layers.2"),
        ('{"layers": {"1": [true]}}', "layers.1"),
        ('{"layers": {"1": 3}}', "layers.1"),
        ('{"1": [0, 0]}', "1: names"),
        ('{"1": [0], "1": [1]}', "twice"),
        ('{"1": [0], "01": [1]}', "twice"),
        ('{"domains": {}}', "domains"),
        ('{"domains": {"d": {}}}', "domains.d"),
        ('{"domains": {"d": {"per_layer_top": {"1": [9]}}}}', "domains.d.per_layer_top.1"),
    ],
)
def test_malformed_lists_are_refused(text: str, where: str) -> None:
    """A line or key that is wrong is an error with its number or name, not layer 0."""
    with pytest.raises(RouterMapError) as caught:
        parse_any(text, "experts.txt", KEY)
    assert "experts.txt" in str(caught.value)
    assert where in str(caught.value)


@given(st.text())
def test_any_text_is_a_map_or_refused(text: str) -> None:
    """Nothing but RouterMapError ever comes out."""
    try:
        found = parse_any(text, "x", KEY)
    except RouterMapError:
        return
    assert found.domains


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["0", "1", "3", "layers", "domains", "d", "per_layer_top", "format", "-1"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


@given(json_values)
def test_any_json_is_a_map_or_refused(value: object) -> None:
    """Malformed JSON of every kind is refused with the file's name."""
    try:
        found = parse_any(json.dumps(value), "the-file", KEY)
    except RouterMapError as error:
        assert "the-file" in str(error)
        return
    assert all(set(counts.layers) == {1, 3} for counts in found.domains.values())


ids = st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True)


@given(st.sampled_from(FORMS), ids, ids)
def test_there_and_back(form: str, first: list[int], third: list[int]) -> None:
    """What is written in a foreign form is read back as the same ranked lists."""
    found = parse_any(json.dumps({"1": first, "3": third}), "x", KEY)
    assert parse_any(export(found, form), "y", KEY).counts["all"].tolist() == found.counts["all"].tolist()


def test_export_chooses_domain_and_top_k() -> None:
    """One domain's busiest experts, in order; an unknown one is refused."""
    assert json.loads(export(MAP, "digits", domain="codegen", top_k=2)) == {"1": [0, 1], "3": [0, 1]}
    with pytest.raises(RouterMapError, match="poetry"):
        export(MAP, "text", domain="poetry")
