"""Owns who may use the proxy as the settings say: the API keys, and whether it may be reached without one.

It is the only place that reads a key in clear, to hash it. It never looks at a request.
"""

from __future__ import annotations

import hashlib
import ipaddress
from pathlib import Path

from moe_proxy.config import Settings
from moe_proxy.errors import ConfigError

_COMMENT = "#"


def key_digest(key: str) -> bytes:
    """What is kept of a key: enough to recognise it, of the same length for every key."""
    return hashlib.sha256(key.encode()).digest()


def read_keys(settings: Settings) -> tuple[str, ...]:
    """The keys of the settings, that of the variable first; none: nobody is asked for one.

    Raises ConfigError for a file that cannot be read, that has no key, or a key that no header can carry; the
    message never has the key.
    """
    keys: list[str] = []
    if settings.api_key is not None:
        keys.append(_checked(settings.api_key.get_secret_value().strip(), "MOE_PROXY_API_KEY"))
    if settings.api_key_file is not None:
        keys += _keys_of(settings.api_key_file)
    return tuple(keys)


def key_digests(settings: Settings) -> tuple[bytes, ...]:
    """The digests of all keys. Raises ConfigError as ``read_keys`` and ``check_exposure`` do."""
    keys = read_keys(settings)
    check_exposure(settings, has_key=bool(keys))
    return tuple(key_digest(key) for key in keys)


def check_exposure(settings: Settings, *, has_key: bool) -> None:
    """Raise ConfigError when others could use the proxy without a key and nobody said that they may."""
    try:
        loopback = settings.host == "localhost" or ipaddress.ip_address(settings.host).is_loopback
    except ValueError as error:
        raise ConfigError(
            f"host {settings.host!r} is no IP address", "use 127.0.0.1, or an address of this machine"
        ) from error
    if not (loopback or has_key or settings.insecure):
        raise ConfigError(
            f"anybody who reaches {settings.host} could use the model",
            "name a file of keys with --api-key-file, listen on 127.0.0.1 behind a reverse proxy that checks"
            " who asks, or add --insecure",
        )


def _keys_of(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"cannot read api_key_file {path}: {reason}", "name a file with one key a line"
        ) from error
    keys = [
        _checked(line.strip(), f"{path} line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.startswith(_COMMENT)
    ]
    if not keys:
        raise ConfigError(f"api_key_file {path} has no key", "write one a line, or leave the setting out")
    return keys


def _checked(key: str, where: str) -> str:
    """``key``. Raises ConfigError when no client could send it."""
    if not key or not all("!" <= character <= "~" for character in key):
        raise ConfigError(
            f"the API key of {where} is empty or has characters that no HTTP header carries",
            "use letters, digits and punctuation, without spaces",
        )
    return key
