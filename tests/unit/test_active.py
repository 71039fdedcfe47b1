"""Which prior the running requests ask for together."""

from __future__ import annotations

import pytest

from moe_proxy.routing.active import ActiveRequests
from moe_proxy.routing.prior import mixture_prior
from moe_proxy.routing.router_map import DomainCounts, ModelKey, RouterMap

KEY = ModelKey(architecture="a", name="m", fingerprint="0" * 64, layers=(0,), experts=4, experts_used=1)
MAP = RouterMap(
    KEY,
    {},
    {"math": DomainCounts(100, {0: (97, 1, 1, 1)}), "codegen": DomainCounts(100, {0: (1, 1, 1, 97)})},
)
MATH, CODE = {"math": 1.0}, {"codegen": 1.0}


@pytest.fixture
def active() -> ActiveRequests:
    """No request yet."""
    return ActiveRequests(MAP, kappa=8.0, min_distance=0.05)


def test_the_mixture_of_running_requests(active: ActiveRequests) -> None:
    """prior = mean over the active requests of their domains' distributions."""
    assert active.begin("1", MATH) == mixture_prior(MAP, (MATH,), 8.0)
    assert active.begin("2", CODE) == mixture_prior(MAP, (MATH, CODE), 8.0)
    assert active.end("1") == mixture_prior(MAP, (CODE,), 8.0)


def test_what_hardly_moves_is_not_pushed(active: ActiveRequests) -> None:
    """It is pushed when it moved by more than a set total-variation distance."""
    assert active.begin("1", MATH) is not None
    assert active.begin("2", MATH) is None
    assert active.end("2") is None


def test_requests_of_one_kind_mix_nothing(active: ActiveRequests, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of a mixture grows with the model; a request that changes no weight does none of it."""
    active.begin("1", MATH)

    def unexpected(*_: object) -> None:
        raise AssertionError("a mixture was made")

    monkeypatch.setattr("moe_proxy.routing.active.mixture", unexpected)
    for number in ("2", "3", "4"):
        assert active.begin(number, MATH) is None
        assert active.end(number) is None


def test_the_last_prior_stays(active: ActiveRequests) -> None:
    """When the last request leaves, its prior stays in force."""
    pushed = active.begin("1", MATH)
    assert active.end("1") is None
    assert active.prior == pushed


def test_a_b_a_ends_on_a(active: ActiveRequests) -> None:
    """A, B, A in quick turn ends on A."""
    first = active.begin("1", MATH)
    active.end("1")
    active.begin("2", CODE)
    active.end("2")
    assert active.begin("3", MATH) == first
    assert active.prior == first


def test_without_a_map_there_is_no_prior() -> None:
    """With no map for the model there is no prior, and nothing breaks."""
    active = ActiveRequests(None, kappa=8.0, min_distance=0.05)
    assert active.begin("1", MATH) is None
    assert active.end("1") is None
    assert active.end("never begun") is None
    assert active.prior is None
