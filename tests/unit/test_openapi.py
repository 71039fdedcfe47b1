"""The OpenAPI description: it names every route, and requests made from it find no fault of the server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import hypothesis
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from moe_proxy.proxy.openapi import description
from moe_proxy.proxy.server import NAMED_ROUTES, ROUTES
from tests.support.surface import surface

load_all_checks()
# What is promised of every answer besides that it is no fault of the server.
PROMISES = [
    CHECKS.get_one(name)
    for name in ("status_code_conformance", "content_type_conformance", "response_schema_conformance")
]
EXAMPLES = 20


def _operations() -> list[tuple[str, str]]:
    paths: Any = description()["paths"]
    return [(method, path) for path, methods in paths.items() for method in methods]


def test_it_names_every_route_and_no_other() -> None:
    """The description and the routes are the same list."""
    routes = {(method.lower(), path) for path, methods in ROUTES.items() for method in methods}
    routes |= {
        (method.lower(), path + "/{name}") for path, methods in NAMED_ROUTES.items() for method in methods
    }
    assert set(_operations()) == routes


async def test_it_is_served() -> None:
    """An OpenAPI description of our own routes is served."""
    async with surface() as proxy:
        status, headers, body = await proxy.get("/openapi.json")
        assert (status, json.loads(body)) == (200, json.loads(json.dumps(description())))
        assert headers["Content-Type"].startswith("application/json")


# Ends when whoever watches goes away, and no request does that by itself.
_ENDLESS = ("get", "/dashboard/events")


@pytest.mark.parametrize(("method", "path"), [found for found in _operations() if found != _ENDLESS])
async def test_no_request_made_from_it_is_a_fault_of_the_server(method: str, path: str) -> None:
    """Schemathesis finds no 5xx but the documented refusals, and no answer that breaks the description."""
    operation: Any = schemathesis.openapi.from_dict(json.loads(json.dumps(description())))[path][method]
    cases = operation.as_strategy()
    if path.startswith("/api/") and operation.definition.raw.get("requestBody"):
        # What breaks the description as well; elsewhere, bodies are for the engine to judge.
        cases |= operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
    documented = {code for code in operation.definition.raw["responses"] if code.isdigit()}

    async with surface(unknown_model="any") as proxy:
        made = 0

        def ask() -> None:
            with requests.Session() as session:
                session.trust_env = False

                @hypothesis.seed(1)
                @hypothesis.settings(
                    max_examples=EXAMPLES, derandomize=True, deadline=None, database=None,
                    phases=[Phase.generate], suppress_health_check=list(HealthCheck),
                )  # fmt: skip
                @hypothesis.given(case=cases)
                def one(case: Any) -> None:
                    nonlocal made
                    made += 1
                    response = case.call(base_url=proxy.url, session=session, timeout=20)
                    assert response.status_code < 500 or str(response.status_code) in documented
                    case.validate_response(response, checks=PROMISES)

                one()

        await asyncio.to_thread(ask)
        assert made > 0
