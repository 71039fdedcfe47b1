"""The operator's changes to requests: parameters stripped, set, and Ollama's defaults."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from moe_proxy.config import load_settings
from moe_proxy.errors import ConfigError
from moe_proxy.proxy.parameters import ParameterFilter
from tests.support.surface import surface

MESSAGES: Any = [{"role": "user", "content": "größe"}]
CHAT = {"model": "planted-moe", "messages": MESSAGES, "temperature": 2, "seed": 3}


def test_strip_then_set() -> None:
    """Parameter filters (strip, set): what is set wins over the client, and over what is stripped."""
    both = ParameterFilter(("temperature", "seed"), {"top_k": 1, "seed": 7})
    assert both.applied({"temperature": 2, "seed": 3, "top_k": 5}) == {"seed": 7, "top_k": 1}
    body = {"top_k": 5}
    assert ParameterFilter(("temperature",)).applied(body) is body
    assert ParameterFilter().applied(body, from_ollama=True) is body


def test_ollama_defaults() -> None:
    """ollama_defaults: Ollama's values under the client's, on its own routes alone."""
    filtered = ParameterFilter(ollama_defaults=True)
    assert filtered.applied({"top_k": 5}, from_ollama=True) == {
        "temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.0, "typical_p": 1.0,
    }  # fmt: skip
    body = {"top_k": 5}
    assert filtered.applied(body) is body


async def test_an_edited_request_reaches_the_engine_whole() -> None:
    """Bytes go on unchanged unless edited; after an edit the length is that of the new body."""
    parameters = ParameterFilter(("temperature",), {"top_k": 1})
    async with surface(parameters=parameters) as proxy:
        for path in ("/v1/chat/completions", "/v1/completions"):
            assert (await proxy.post(path, CHAT))[0] == 200
        options = {"temperature": 2.0, "seed": 3}
        assert (await proxy.post("/api/chat", {"model": "m", "messages": MESSAGES}))[0] == 404
        body = {"model": "planted-moe", "messages": MESSAGES, "options": options}
        assert (await proxy.post("/api/chat", body))[0] == 200
        edited: Any = {"model": "planted-moe", "messages": MESSAGES, "seed": 3, "top_k": 1}
        assert [seen.body for seen in proxy.fake.requests[:2]] == [edited, edited]
        translated: Any = proxy.fake.requests[2].body
        assert (translated["seed"], translated["top_k"]) == (3, 1)
        assert "temperature" not in translated
    async with surface(parameters=ParameterFilter(("min_p",))) as proxy:
        raw = json.dumps(CHAT, indent=2).encode()
        async with proxy.http.post(proxy.url + "/v1/chat/completions", data=raw) as response:
            assert response.status == 200
        assert proxy.fake.requests[0].body_sha256 == hashlib.sha256(raw).hexdigest()


@pytest.mark.parametrize("line", ['strip_parameters = ["messages"]', "set_parameters = { model = 'x' }"])
def test_what_a_request_is_about_is_no_parameter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """A filter that would take the prompt or the model away is refused with the name."""
    path = tmp_path / "config.toml"
    path.write_text(line)
    monkeypatch.setenv("MOE_PROXY_CONFIG", str(path))
    with pytest.raises(ConfigError, match=r"messages|model"):
        load_settings({})


def test_filters_in_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists are separated by commas in a variable, a table is JSON there and adds to that of the file."""
    path = tmp_path / "config.toml"
    path.write_text('strip_parameters = ["seed", "min_p"]\n[set_parameters]\ntop_k = 20\nstop = ["a"]\n')
    monkeypatch.setenv("MOE_PROXY_CONFIG", str(path))
    settings = load_settings({})
    assert settings.strip_parameters == ("seed", "min_p")
    assert settings.set_parameters == {"top_k": 20, "stop": ["a"]}
    monkeypatch.setenv("MOE_PROXY_STRIP_PARAMETERS", "seed, top_p,")
    monkeypatch.setenv("MOE_PROXY_SET_PARAMETERS", '{"top_k": 3}')
    settings = load_settings({})
    assert settings.strip_parameters == ("seed", "top_p")
    assert settings.set_parameters == {"top_k": 3, "stop": ["a"]}
