"""The pager's control routes of the fake: priors move residency at once."""

from __future__ import annotations

import os
import time

from aiohttp import web
from fake_llama_state import EXPERT_BYTES, EXPERTS, EXPERTS_USED, FAKE, LAYERS, Fake, error


def resident_count(fake: Fake) -> int:
    """Resident experts over all layers."""
    return sum(len(ids) for ids in fake.resident.values())


def gauges(fake: Fake) -> dict[str, int]:
    """The gauges of /experts/stats."""
    return {
        "resident_bytes": resident_count(fake) * EXPERT_BYTES,
        "resident_experts": resident_count(fake),
        "locked_bytes": 0,
        "budget_bytes": fake.budget_bytes,
    }


async def experts(request: web.Request) -> web.Response:
    """GET /experts."""
    fake = request.app[FAKE]
    slabs = [
        {"name": f"ffn_{part}_exps", "type": "f16", "slab_bytes": EXPERT_BYTES // 4}
        for part in ("gate", "up", "down")
    ]
    last = fake.priors[-1] if fake.priors else {"id": None, "kappa": 0.0}
    ram = {
        "home": "mmap",
        "total_bytes": LAYERS * EXPERTS * EXPERT_BYTES,
        "experts": LAYERS * EXPERTS,
        **gauges(fake),
    }
    return web.json_response(
        {
            "mode": "on",
            "version": 1,
            "model": {"layers": list(range(LAYERS)), "experts": EXPERTS, "experts_used": EXPERTS_USED},
            "layout": {
                str(layer): {"expert_bytes": EXPERT_BYTES, "tensors": slabs} for layer in range(LAYERS)
            },
            "tiers": {"ram": ram},
            "policy": {"name": "posterior", "half_life_tokens": 64, "horizon_tokens": 64},
            "prior": {"id": last["id"], "kappa": last["kappa"]},
            "mover": {"pending": 0},
            "reasons": [],
        }
    )


async def experts_stats(request: web.Request) -> web.Response:
    """GET /experts/stats."""
    fake = request.app[FAKE]
    answer: dict[str, object] = {
        "snapshot": len(fake.snapshots),
        "start_id": f"fake-{os.getpid()}",
        "uptime_us": int((time.monotonic() - fake.started_at) * 1e6),
        **fake.counters,
        **gauges(fake),
        "refusals": {"mlock": 0},
    }
    since = request.query.get("since")
    if since is not None:
        if not since.isdigit() or int(since) >= len(fake.snapshots):
            return error(400, f"no snapshot {since}", "invalid_request_error")
        before = fake.snapshots[int(since)]
        answer["delta"] = {name: value - before[name] for name, value in fake.counters.items()}
    fake.snapshots.append(dict(fake.counters))
    return web.json_response(answer)


async def experts_residency(request: web.Request) -> web.Response:
    """GET /experts/residency."""
    fake = request.app[FAKE]
    return web.json_response({"layers": {str(layer): sorted(ids) for layer, ids in fake.resident.items()}})


async def experts_usage(request: web.Request) -> web.Response:
    """GET /experts/usage."""
    fake = request.app[FAKE]
    name = request.query.get("request")
    if name is not None and name not in fake.usage:
        return error(404, f"no request {name}", "not_found_error")
    names = [name] if name is not None else list(fake.usage)
    layers = {
        str(layer): [sum(column) for column in zip(*(fake.usage[n][layer] for n in names), strict=True)]
        or [0] * EXPERTS
        for layer in range(LAYERS)
    }
    tokens = sum(fake.usage_tokens[n] for n in names)
    if request.query.get("reset") == "1":
        for n in names:
            del fake.usage[n], fake.usage_tokens[n]
    return web.json_response({"tokens": tokens, "layers": layers})


async def experts_prior(request: web.Request) -> web.Response:
    """POST /experts/prior: the likeliest experts of each layer become resident at once."""
    fake, body = request.app[FAKE], await request.json()
    entries = 0
    for layer, pairs in body["layers"].items():
        for expert, _ in pairs:
            if int(layer) >= LAYERS or not 0 <= expert < EXPERTS:
                return error(
                    400, f"layer {layer} has no expert {expert} of {EXPERTS}", "invalid_request_error"
                )
            entries += 1
    fake.priors.append(body)
    fake.counters["priors"] += 1
    room = fake.budget_bytes // (LAYERS * EXPERT_BYTES)
    for layer in range(LAYERS):
        ranked = sorted(body["layers"].get(str(layer), []), key=lambda pair: -pair[1])
        wanted = {expert for expert, _ in ranked[:room]}
        fake.counters["promotions"] += len(wanted - fake.resident[layer])
        fake.counters["demotions"] += len(fake.resident[layer] - wanted)
        fake.resident[layer] = wanted
    return web.json_response({"id": body["id"], "entries": entries})


async def experts_budget(request: web.Request) -> web.Response:
    """POST /experts/budget."""
    fake, body = request.app[FAKE], await request.json()
    size = body.get("ram_bytes")
    if not isinstance(size, int) or size < 0:
        return error(400, f"ram_bytes must be a number of bytes, not {size!r}", "invalid_request_error")
    fake.budget_bytes = size
    fake.budgets.append(size)
    return web.json_response({"ram_bytes": size})
