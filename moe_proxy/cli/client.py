"""Owns how a command talks to the proxy that runs on a port. Commands are short-lived and may block."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any

from moe_proxy.config import Settings
from moe_proxy.errors import ConfigError, NotRunningError
from moe_proxy.instance import InstancePaths, RunningProxy, instance_paths, running_ports, running_proxy

# A local proxy is asked directly, whatever HTTP_PROXY says.
_NOT_READY = 503
_NO_KEY = 401

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def paths_of(settings: Settings) -> InstancePaths:
    """The files of the instance that ``settings`` speaks of."""
    return instance_paths(settings.runtime_dir, settings.state_dir, settings.port)


def find_proxy(settings: Settings) -> RunningProxy:
    """The proxy on the port of ``settings``. Raises NotRunningError, naming those on other ports."""
    proxy = running_proxy(paths_of(settings))
    if proxy is not None:
        return proxy
    missing = f"no proxy is running on port {settings.port}"
    others = running_ports(settings.runtime_dir, settings.state_dir)
    if not others:
        raise NotRunningError(missing, "start one with: moe-proxy start")
    named = f"port {others[0]}" if len(others) == 1 else f"ports {', '.join(map(str, others))}"
    verb = "one is" if len(others) == 1 else "some are"
    raise NotRunningError(f"{missing}, {verb} on {named}", f"add --port {others[0]}")


def get_json(proxy: RunningProxy, path: str, timeout_s: float = 5.0, keys: tuple[str, ...] = ()) -> Any:
    """GET ``path``, parsed; of the errors, 503 alone is an answer: not ready, and why.

    Of the ``keys``, the first is sent. Raises NotRunningError when nothing that is understood comes in time,
    ConfigError when another key is needed.
    """
    return _ask(proxy, path, None, timeout_s, keys)


def post_json(
    proxy: RunningProxy, path: str, body: Mapping[str, object], timeout_s: float, keys: tuple[str, ...] = ()
) -> Any:
    """POST ``body`` to ``path``; the answer as ``get_json`` gives it, with the same errors."""
    return _ask(proxy, path, json.dumps(body).encode(), timeout_s, keys)


def _ask(proxy: RunningProxy, path: str, body: bytes | None, timeout_s: float, keys: tuple[str, ...]) -> Any:
    url = proxy.url + path
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    if body is not None:
        headers["Content-Type"] = "application/json"
    try:
        try:
            request = urllib.request.Request(url, body, headers)  # noqa: S310 - an http URL, our own
            with _OPENER.open(request, timeout=timeout_s) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                if error.code == _NO_KEY:
                    raise ConfigError(
                        f"the proxy at {proxy.url} wants an API key",
                        "set MOE_PROXY_API_KEY or MOE_PROXY_API_KEY_FILE to one of its keys",
                    ) from error
                if error.code != _NOT_READY:
                    raise
                return json.load(error)
    except (OSError, ValueError, RecursionError, HTTPException) as error:
        raise NotRunningError(f"the proxy at {url} does not answer: {error}", "see moe-proxy logs") from error
