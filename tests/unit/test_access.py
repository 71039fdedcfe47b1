"""API keys: where they come from, what is said about wrong ones, and when one is needed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from moe_proxy.access import key_digests, read_keys
from moe_proxy.config import Settings, load_settings
from moe_proxy.errors import ConfigError

SECRET = "sk-very-secret"


def _settings(**changes: Any) -> Settings:
    return Settings.model_construct(**(Settings.model_construct().model_dump() | changes))


def test_keys_of_file_and_variable(tmp_path: Path) -> None:
    """File, several: one a line, with comments; and one of the environment, which comes first."""
    path = tmp_path / "keys"
    path.write_text(f"# of the house\n\n{SECRET}\n  another \n")
    settings = _settings(api_key=SecretStr("first"), api_key_file=path)
    assert read_keys(settings) == ("first", SECRET, "another")
    assert key_digests(settings)[1] == hashlib.sha256(SECRET.encode()).digest()
    assert read_keys(_settings()) == ()


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot read"), (b"", "has no key"), (b"# no\n", "has no key"), (b"\xff\xfe", "not UTF-8"),
     (f"ok\n{SECRET} {SECRET}\n".encode(), "line 2"), (f"{SECRET}ü".encode(), "line 1")],
)  # fmt: skip
def test_a_wrong_key_file_is_named_and_no_key_of_it(tmp_path: Path, content: bytes | None, said: str) -> None:
    """The key is never visible in errors; the file and its line are."""
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        read_keys(_settings(api_key_file=path))
    assert str(path) in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_wrong_key_of_the_configuration_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key is never visible in errors or in what is printed of settings, and no flag is offered for it."""
    path = tmp_path / "config.toml"
    monkeypatch.setenv("MOE_PROXY_CONFIG", str(path))
    path.write_text(f'api_key = ["{SECRET}"]\n')
    with pytest.raises(ConfigError, match="setting api_key:") as caught:
        load_settings({})
    assert SECRET not in str(caught.value)
    assert "--api-key" not in str(caught.value)
    assert caught.value.__cause__ is None
    monkeypatch.setenv("MOE_PROXY_API_KEY", f"{SECRET} ")
    path.write_text("")
    assert read_keys(load_settings({})) == (SECRET,)
    assert SECRET not in repr(load_settings({}))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5"])
def test_a_key_is_needed_off_loopback(tmp_path: Path, host: str) -> None:
    """Another address than loopback needs an API key or --insecure."""
    with pytest.raises(ConfigError, match="--api-key-file"):
        key_digests(_settings(host=host))
    assert key_digests(_settings(host=host, insecure=True)) == ()
    assert len(key_digests(_settings(host=host, api_key=SecretStr(SECRET)))) == 1
    for local in ("127.0.0.1", "::1", "localhost"):
        assert key_digests(_settings(host=local)) == ()
