"""A prior moves experts, and the counters show it."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_proxy.engine.build import EngineBuild
from moe_proxy.model.gguf_header import read_header
from moe_proxy.model.layout import layout_of
from moe_proxy.resources import data_path
from moe_proxy.routing.prior import mixture_prior
from moe_proxy.routing.router_map import RouterMap, load
from tests.support.engine_process import engine_process
from tests.support.proxy_process import run_cli, wait_until
from tests.support.text import CODE, call, greedy

pytestmark = pytest.mark.engine


def test_collect_makes_the_shipped_map(
    proxy_env: dict[str, str], engine: EngineBuild, planted_model: Path, tmp_path: Path
) -> None:
    """The shipped map was made by running the labelled prompts through the engine: it comes out again."""
    path = tmp_path / "map.json"
    done = run_cli(proxy_env, "collect", "--model", str(planted_model), "--output", str(path), timeout_s=600)
    assert done.returncode == 0, done.stderr
    made, shipped = load(path), load(data_path("maps") / "planted-moe.json")
    assert (made.model, made.domains) == (shipped.model, shipped.domains)


def _share_resident(socket: Path, router_map: RouterMap, domain: str) -> float:
    """Share of the domain's routed picks (by the map) whose expert is resident now."""
    layers = call(socket, "GET", "/experts/residency")["layers"]
    resident = {int(layer): set(ids) for layer, ids in layers.items()}
    counts = router_map.domains[domain].layers
    hit = sum(n for layer, row in counts.items() for e, n in enumerate(row) if e in resident.get(layer, ()))
    return hit / sum(sum(row) for row in counts.values())


def _push(socket: Path, router_map: RouterMap, domain: str) -> None:
    prior = mixture_prior(router_map, ({domain: 1.0},), kappa=256.0)
    assert prior is not None
    call(socket, "POST", "/experts/prior", prior.to_json())
    wait_until(lambda: call(socket, "GET", "/experts")["mover"]["pending"] == 0, "the mover has settled")


def _hit_rate(socket: Path, prompt: str) -> float:
    """Measured hit rate of one greedy answer to ``prompt``."""
    before = call(socket, "GET", "/experts/stats")
    greedy(socket, prompt, tokens=8)
    delta = call(socket, "GET", f"/experts/stats?since={before['snapshot']}")["delta"]
    return float(delta["hits"] / delta["picks"])


def test_a_prior_moves_residency_and_hit_rate(engine: EngineBuild, planted_model: Path) -> None:
    """A prior for A raises A's residency and the hit rate of an A prompt; B's then lowers A's."""
    router_map = load(data_path("maps") / "planted-moe.json")
    budget = layout_of(read_header(planted_model)).total_expert_bytes * 30 // 100
    flags = ("--cpu-moe", "--load-mode", "mmap")
    env = {"MOE_PAGER": "1", "MOE_PAGER_RAM_BYTES": str(budget)}
    with engine_process(engine.server, planted_model, *flags, **env) as socket:
        cold = _share_resident(socket, router_map, "codegen")
        _push(socket, router_map, "codegen")
        with_a = _share_resident(socket, router_map, "codegen")
        hits_with_a = _hit_rate(socket, CODE)
        _push(socket, router_map, "creative_write")
        with_b = _share_resident(socket, router_map, "codegen")
        hits_with_b = _hit_rate(socket, CODE)
    # A server of its own, because what it counts moves experts too.
    with engine_process(engine.server, planted_model, *flags, **env) as socket:
        hits_without = _hit_rate(socket, CODE)
    assert with_a > cold
    assert with_b < with_a
    assert hits_with_b < hits_with_a
    assert hits_with_a > hits_without
