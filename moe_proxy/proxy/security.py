"""Owns which requests are looked at at all: host, origin, target, path, API key, remote media. Pure.

It runs before a body is read and before a route is chosen, and it never answers anything itself.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from ipaddress import ip_address
from urllib.parse import urlsplit

from moe_proxy.errors import ForbiddenError, RequestError, UnauthorizedError
from moe_proxy.proxy.context import SecurityPolicy

_LOCAL_SUFFIXES = (".localhost", ".local", ".internal")
_LOCAL_ORIGIN_HOSTS = frozenset({"localhost", "127.0.0.1", "0.0.0.0", "::1"})  # noqa: S104 - nothing binds here
# Pages of programs on this machine, not of the web; the list that Ollama's users rely on.
_LOCAL_ORIGIN_SCHEMES = frozenset({"app", "file", "tauri", "vscode-webview", "vscode-file"})
# What a load balancer, a client that looks for Ollama, and a browser, which cannot send a key with an
# address, may see: nothing of the model, nothing of its use.
_OPEN_PATHS = frozenset(
    {"/", "/health", "/livez", "/dashboard", "/dashboard/dashboard.css", "/dashboard/dashboard.js",
     "/dashboard/charts.js", "/dashboard/dashboard.html"}
)  # fmt: skip
_UNRESERVED = frozenset(string.ascii_letters + string.digits + "-._~")
_ESCAPE = re.compile("%([0-9A-Fa-f]{2})")
_MEDIA_FIELDS = ("image_url", "video_url", "audio_url", "input_audio", "input_video", "source", "file", "url")


@dataclass(frozen=True)
class Head:
    """What of a request's head is judged. ``target`` is the request target as it came."""

    target: str
    hosts: tuple[str, ...]
    origin: str | None
    fetch_site: str | None


def check_head(head: Head, policy: SecurityPolicy) -> None:
    """Raise ForbiddenError for a host, origin or target that is not ours to answer."""
    if len(head.hosts) > 1:
        raise ForbiddenError("more than one Host header")
    # Without a Host header no browser is at work, and only a browser can be led here against its user's will.
    for authority in (*head.hosts, *_authority_of(head.target)):
        if not host_allowed(authority, policy):
            raise ForbiddenError(f"host {authority[:80]!r} is not allowed", "add it to allowed_hosts")
    if head.origin is not None:
        own = f"{head.hosts[0]}" if head.hosts else ""
        if not origin_allowed(head.origin, policy, own):
            raise ForbiddenError(f"origin {head.origin[:80]!r} is not allowed", "add it to allowed_origins")
    elif head.fetch_site == "cross-site":
        raise ForbiddenError("a page of another site asked without saying which")


def check_key(headers: Mapping[str, str], path: str, policy: SecurityPolicy) -> None:
    """Raise UnauthorizedError when a key is needed and the headers bring none of ours; it never names one.

    Bearer is what OpenAI's and Ollama's clients send, X-Api-Key what Anthropic's do.
    """
    if not policy.key_digests or path in _OPEN_PATHS:
        return
    scheme, _, bearer = headers.get("Authorization", "").partition(" ")
    given = bearer.strip() if scheme.lower() == "bearer" else ""
    given = given or headers.get("X-Api-Key", "").strip()
    if not given:
        raise UnauthorizedError("an API key is needed", "send it as Authorization: Bearer KEY")
    digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
    # Of hashes, and of all of them: how long it takes tells nothing about any key.
    if sum([hmac.compare_digest(digest, known) for known in policy.key_digests]) == 0:
        raise UnauthorizedError("the API key is wrong", "ask whoever runs this proxy for one")


def host_allowed(authority: str, policy: SecurityPolicy) -> bool:
    """Whether ``authority`` (host with or without port) can only mean this machine or its private network."""
    host = _host_of(authority)
    if host is None:
        return False
    if host == "localhost" or host.endswith(_LOCAL_SUFFIXES) or host == policy.host_name.lower():
        return host != ""
    try:
        address = ip_address(host)
    except ValueError:
        return any(fnmatchcase(host, pattern.lower()) for pattern in policy.allowed_hosts)
    return address.is_loopback or address.is_private or str(address) in policy.allowed_hosts


def origin_allowed(origin: str, policy: SecurityPolicy, own_authority: str = "") -> bool:
    """Whether a page of ``origin`` may ask: this machine's, this server's own, or one that was configured."""
    lowered = origin.lower()
    if any(fnmatchcase(lowered, pattern.lower()) for pattern in policy.allowed_origins):
        return True
    try:
        parts = urlsplit(lowered)
        host = parts.hostname
    except ValueError:
        return False
    if parts.scheme in _LOCAL_ORIGIN_SCHEMES:
        return True
    if parts.scheme not in ("http", "https"):
        return False
    return host in _LOCAL_ORIGIN_HOSTS or (own_authority != "" and parts.netloc == own_authority.lower())


def normal_path(target: str) -> str:
    """The path of a request target as it is routed, judged and forwarded.

    Unescaped where that changes nothing, no ``//``, no dot segments, no slash at the end; ``%2F`` stays.
    """
    path = target.partition("#")[0].partition("?")[0]
    if "://" in path:
        path = "/" + path.partition("://")[2].partition("/")[2]
    segments: list[str] = []
    for segment in _ESCAPE.sub(_unescape, path).split("/"):
        if segment == "..":
            del segments[-1:]
        elif segment not in ("", "."):
            segments.append(segment)
    return "/" + "/".join(segments)


def check_media(value: object) -> None:
    """Raise RequestError when a message carries an image (or sound, or film) by address instead of by value.

    llama-server would fetch it: from this machine, with this machine's reach.
    """
    if not isinstance(value, Mapping):
        return
    for name in ("messages", "input", "content", "prompt"):
        for url in _media_urls(value.get(name)):
            if not url.startswith("data:") and ("://" in url[:64] or url[:4].lower() in ("http", "file")):
                raise RequestError(
                    f"remote media is not fetched: {url[:80]!r}", "send it as a data: URL with base64 data"
                )


def _media_urls(value: object) -> Iterator[str]:
    """Addresses in messages and their parts, at any depth of ``content`` and ``output``."""
    if isinstance(value, list):
        for item in value:
            yield from _media_urls(item)
    elif isinstance(value, Mapping) and value.get("type") != "search_result":  # names its source, no more
        for field in ("content", "output"):
            if not isinstance(value.get(field), str):
                yield from _media_urls(value.get(field))
        for field in _MEDIA_FIELDS:
            inner = value.get(field)
            for address in (inner, *(inner.values() if isinstance(inner, Mapping) else ())):
                if isinstance(address, str):
                    yield address


def _unescape(match: re.Match[str]) -> str:
    character = chr(int(match[1], 16))
    return character if character in _UNRESERVED else match[0].upper()


def _authority_of(target: str) -> tuple[str, ...]:
    """The authority of an absolute-form target; none for the usual form."""
    if target.startswith(("/", "*")):
        return ()
    scheme, separator, rest = target.partition("://")
    if not separator:
        return (scheme,)
    return (re.split("[/?#]", rest, maxsplit=1)[0],)


def _host_of(authority: str) -> str | None:
    """The host without port and final dot, lower-cased; None when it is malformed."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:@/\s]+))(?::\d{0,5})?", authority.strip())
    return (match[1] or match[2]).lower().removesuffix(".") if match else None
