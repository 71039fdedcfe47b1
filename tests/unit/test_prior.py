"""The prior: a mixture of the map's domains, as the requests that are active ask for."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_proxy.routing.prior import Array, Prior, domain_weights, mixture, mixture_prior, total_variation
from moe_proxy.routing.router_map import DomainCounts, ModelKey, RouterMap

KEY = ModelKey("qwen3moe", "tiny", "ab" * 32, (0, 1), 4, 2)
MAP = RouterMap(
    KEY,
    {},
    {
        "math": DomainCounts(10, {0: (10, 10, 0, 0), 1: (20, 0, 0, 0)}),
        "logic": DomainCounts(10, {0: (0, 0, 10, 10), 1: (0, 0, 0, 20)}),
    },
)
MATH, LOGIC = {"math": 1.0}, {"logic": 1.0}


def prior_of(*active: dict[str, float]) -> Prior:
    """The prior of requests with these distributions."""
    prior = mixture_prior(MAP, active, kappa=32.0)
    assert prior is not None
    return prior


def picks_of(*active: dict[str, float]) -> Array:
    """The mixture of requests with these distributions."""
    weights = domain_weights(MAP, active)
    assert weights is not None
    return mixture(MAP, weights)


def test_one_domain() -> None:
    """p_d(l, e) = experts_used * (count + 1) / (sum of counts + experts)."""
    prior = prior_of(MATH)
    assert prior.layers[0] == ((0, 0.916667), (1, 0.916667), (2, 0.083333), (3, 0.083333))
    assert prior.layers[1][1] == (1, 0.083333)


def test_a_probability_is_at_most_one() -> None:
    """A token picks an expert once, so that a probability over 1 (picks of only one expert) is 1."""
    assert prior_of(MATH).layers[1][0] == (0, 1.0)


def test_mixture_over_requests_and_domains() -> None:
    """prior = mean over requests of sum over domains of q_r(d) p_d."""
    math, logic = prior_of(MATH), prior_of(LOGIC)
    mixed = prior_of(MATH, {"math": 0.5, "logic": 0.5})
    for layer in KEY.layers:
        for expert, p in mixed.layers[layer]:
            assert p == pytest.approx(
                0.75 * math.layers[layer][expert][1] + 0.25 * logic.layers[layer][expert][1], abs=2e-6
            )


@pytest.mark.parametrize("distribution", [{}, {"poetry": 1.0}, {"math": 0.0}, {"math": 0.5, "logic": 0.5}])
def test_abstention_is_the_average_of_all_domains(distribution: dict[str, float]) -> None:
    """An abstention adds the average of all domains, and so does a label that the map does not hold."""
    assert prior_of(distribution).layers == prior_of(MATH, LOGIC).layers


def test_nothing_to_say() -> None:
    """Without a map, a domain or a request there is no prior."""
    assert mixture_prior(None, [MATH], 32.0) is None
    assert mixture_prior(MAP, [], 32.0) is None
    assert mixture_prior(replace(MAP, domains={}), [MATH], 32.0) is None


def test_ids() -> None:
    """Equal mixtures have equal ids, different ones different ids; a given id is kept."""
    assert prior_of(MATH, LOGIC).id == prior_of(LOGIC, MATH).id
    assert len({prior_of(MATH).id, prior_of(LOGIC).id, prior_of(MATH, LOGIC).id}) == 3
    other = mixture_prior(MAP, [MATH], 64.0)
    named = mixture_prior(MAP, [MATH], 32.0, "mine")
    assert other is not None and other.id != prior_of(MATH).id
    assert named is not None and named.id == "mine"


def test_body_of_the_control_call() -> None:
    """The form of POST /experts/prior: id, kappa, and pairs of expert and probability by layer."""
    body = json.loads(json.dumps(prior_of(MATH).to_json()))
    assert (body["id"], body["kappa"]) == (prior_of(MATH).id, 32.0)
    assert body["layers"]["0"][0] == [0, 0.916667]
    assert set(body["layers"]) == {"0", "1"}


def test_distances() -> None:
    """Total variation is 0 for equals, 1 for nothing in common, and symmetric."""
    math, logic, both = picks_of(MATH), picks_of(LOGIC), picks_of(MATH, LOGIC)
    assert total_variation(math, math) == 0.0
    assert total_variation(np.array([1.0, 0.0]), np.array([0.0, 2.0])) == 1.0
    assert total_variation(math, logic) == total_variation(logic, math)
    assert 0.0 < total_variation(math, both) < total_variation(math, logic)


probabilities = st.floats(0, 1, allow_nan=False)


@given(
    st.lists(
        st.dictionaries(st.sampled_from(["math", "logic", "other"]), probabilities), min_size=1, max_size=16
    )
)
def test_any_requests_give_probabilities(active: list[dict[str, float]]) -> None:
    """Whatever classifiers say, a prior holds probabilities; two are no further apart than their weights."""
    prior = prior_of(*active)
    assert all(0.0 < p <= 1.0 for row in prior.layers.values() for _, p in row)
    weights, math = domain_weights(MAP, active), domain_weights(MAP, [MATH])
    assert weights is not None and math is not None
    distance = total_variation(picks_of(*active), picks_of(MATH))
    assert 0.0 <= distance <= total_variation(weights, math) + 1e-5
