"""Owns the record of everything that is handed to the HTTP surface; it never makes any of it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from moe_proxy.domains.base import DOMAINS, Classification, Classifier
from moe_proxy.labelling import Labelling
from moe_proxy.metrics import Metrics
from moe_proxy.model.gguf_header import GgufHeader
from moe_proxy.proxy.access_log import AccessLog
from moe_proxy.proxy.keep_alive import KeepAlivePolicy
from moe_proxy.proxy.parameters import ParameterFilter

UnknownModel = Literal["strict", "any"]
StatsProvider = Callable[[], Awaitable[Mapping[str, object]]]
PlacementProvider = Callable[[], Awaitable[Mapping[str, object] | None]]


async def _unknown_placement() -> None:
    """Nobody knows where experts lie."""


class BackendStatus(Protocol):
    """What is known of llama-server at this moment."""

    @property
    def state(self) -> str:
        """stopped, asleep, starting, loading, ready, draining, crashed or failed."""
        ...

    @property
    def reason(self) -> str:
        """Why it is not ready, in words; empty when it is."""
        ...

    @property
    def progress(self) -> float | None:
        """Of loading, 0 to 1; None when unknown."""
        ...


class Backend(Protocol):
    """The one llama-server behind the proxy."""

    @property
    def socket(self) -> Path:
        """The Unix socket it listens on."""
        ...

    @property
    def status(self) -> BackendStatus:
        """For reports only: whoever needs the engine awaits ``ready`` instead of looking here first."""
        ...

    async def ready(self, timeout_s: float) -> None:
        """Return once requests can be sent. Raises EngineError with the reason."""
        ...


class RequestObserver(Protocol):
    """Is told of each request that generates text. What it raises is counted and reaches no client."""

    def begin(self, request_id: str, path: str, classification: Classification | None) -> None:
        """Before the request is forwarded; must not wait. None: no text, or no classifier."""
        ...

    async def end(self, request_id: str) -> None:
        """After the last byte, an error or a disconnect; runs beside the requests, exactly once per begin."""
        ...


@dataclass(frozen=True)
class ModelCard:
    """The served model as clients see it.

    ``digest`` is 64 hex characters, the same for the same file. ``context_length``: the tokens one slot has.
    ``capabilities`` are Ollama's words: completion, tools, thinking, vision, insert, embedding.
    ``upstream_name`` is the alias llama-server was started with; empty: ``name``.
    """

    name: str
    aliases: tuple[str, ...]
    header: GgufHeader
    digest: str
    context_length: int
    capabilities: tuple[str, ...]
    upstream_name: str = ""
    vram_bytes: int = 0


@dataclass(frozen=True)
class Limits:
    """Bounds of the HTTP surface.

    ``header_wait_s`` is how long a streaming client waits for a real status line before it gets 200 and signs
    of life every ``keep_alive_s``. ``connect_retry_s`` bounds how long a refused connection is tried again:
    the engine may have died a moment ago. A client that sends or takes no byte for ``stall_s`` while its
    turn it is has gone, and gives its place back. A slow classifier without an answer after ``classify_s``
    is done without. Bodies over ``inline_body_bytes`` are parsed and translated in a thread.
    """

    hold_timeout_s: float = 600.0
    header_wait_s: float = 10.0
    keep_alive_s: float = 10.0
    connect_retry_s: float = 5.0
    drain_s: float = 30.0
    cut_grace_s: float = 2.0
    stall_s: float = 120.0
    classify_s: float = 1.0
    max_in_flight: int = 512
    max_body_bytes: int = 100 << 20
    inline_body_bytes: int = 256 << 10
    retry_after_s: int = 1


@dataclass(frozen=True)
class SecurityPolicy:
    """Who may ask. Hosts and origins are patterns with ``*``, allowed beyond the built-in ones.

    ``key_digests`` are the SHA-256 of the keys of which a request must bring one; none: no key is needed.
    """

    host_name: str = ""
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    key_digests: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Clocks:
    """The three times of the surface: for intervals, for durations in answers, for dates in answers."""

    monotonic_s: Callable[[], float] = time.monotonic
    monotonic_ns: Callable[[], int] = time.monotonic_ns
    wall_ns: Callable[[], int] = time.time_ns


@dataclass(frozen=True)
class ProxyContext:
    """Everything the HTTP surface works with.

    ``placement`` says where experts lie, and gives None while nobody knows.
    ``domain_labels`` are the domains a client may name in ``X-Moe-Domain``. ``unload`` stops the engine until
    ``backend.ready`` is next awaited, and does not wait; None: a request to unload is acknowledged and
    changes nothing. ``keep_alive`` says when it is called. ``open_routes`` are those of llama-server that
    write its state and are open all the same.
    """

    backend: Backend
    model: ModelCard
    observer: RequestObserver
    stats: StatsProvider
    placement: PlacementProvider = _unknown_placement
    classifier: Classifier | None = None
    domain_labels: frozenset[str] = frozenset()
    labelling: Labelling | None = None
    limits: Limits = Limits()
    security: SecurityPolicy = SecurityPolicy()
    clocks: Clocks = Clocks()
    metrics: Metrics = field(default_factory=Metrics)
    unknown_model: UnknownModel = "strict"
    unknown_model_openai: UnknownModel = "any"
    ollama_version: str = "0.13.0"
    unload: Callable[[], None] | None = None
    keep_alive: KeepAlivePolicy = field(default_factory=KeepAlivePolicy)
    open_routes: frozenset[str] = frozenset()
    parameters: ParameterFilter = field(default_factory=ParameterFilter)
    access_log: AccessLog | None = None
    new_id: Callable[[], str] = lambda: secrets.token_hex(8)

    @property
    def labels(self) -> frozenset[str]:
        """The domains that a client may name: the built-in ones and those of the router map."""
        return self.domain_labels.union(DOMAINS)
