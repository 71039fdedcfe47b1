"""The state of the fake llama-server: its switches, what it saw, and the counters of its pretended pager."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from aiohttp import web

LAYERS, EXPERTS, EXPERTS_USED, EXPERT_BYTES = 4, 32, 4, 4096
REPLY = "Une pomme coûte 2 €, naïve 🙂 answer."


@dataclass
class Switches:
    """One field per way to misbehave; the option is the name with dashes."""

    log_lines: int = 0  # lines printed before anything else
    log_line_bytes: int = 40  # length of each of them
    exit_at_start: int = -1  # exit code; -1: do not exit
    fail_from_start: int = 0  # with --starts-file: from this start on (1 = the first) exit with code 3
    starts_file: str = ""  # one line with the pid is appended per start
    never_ready: bool = False  # /health answers 503 for ever
    never_listen: bool = False  # the socket is never bound
    ready_after: float = 0.0  # seconds of "Loading model" before ready
    crash_after: float = 0.0  # seconds after being ready; 0: never
    ignore_sigterm: bool = False
    grandchild: bool = False  # a child of its own that ignores SIGTERM; its pid is printed as "grandchild N"
    die_before_headers: bool = False  # SIGKILL to itself as soon as a generation is asked for
    die_after_chunks: int = 0  # SIGKILL to itself after so many streamed events
    hang: bool = False  # a generation never answers
    hang_after_chunks: int = 0  # a stream stops after so many events, its connection stays open
    garbage: bool = False  # 200 with bytes that are neither JSON nor SSE
    truncate_after_chunks: int = 0  # connection closed in mid-stream, without finish, [DONE] or last chunk
    slow_chunks: float = 0.0  # seconds between streamed events
    error_status: int = 0  # every generation is answered with this status and llama-server's error body
    stream_error: bool = False  # an error event in the middle of the stream
    ping: bool = False  # an SSE comment before each event
    reply: str = REPLY  # cut into tokens at spaces
    reasoning: str = ""  # sent as reasoning_content before the reply
    tool_call: bool = False  # when the request has tools, call the first one
    page: bool = False  # the page of its own is built in
    pager: bool = True  # False: every /experts route answers 501
    embed_limit: int = 0  # texts with more words are refused as over the batch; 0: none is
    embed_hang: bool = False  # embeddings never answer
    pooling: bool = True  # False: embeddings answer 501
    control_fails: bool = False  # every /experts route answers 500
    control_delay: float = 0.0  # seconds before a /experts route answers


@dataclass
class Seen:
    """One request as it came."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: object
    body_sha256: str
    finished: bool = False
    disconnected: bool = False


@dataclass
class Fake:
    """All state of one run."""

    alias: str
    model: str
    slots: int
    context_length: int
    switches: Switches
    ready: bool = False
    started_at: float = field(default_factory=time.monotonic)
    requests: list[Seen] = field(default_factory=list)
    priors: list[dict[str, object]] = field(default_factory=list)
    budgets: list[int] = field(default_factory=list)
    usage: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    usage_tokens: dict[str, int] = field(default_factory=dict)
    resident: dict[int, set[int]] = field(default_factory=lambda: {n: set() for n in range(LAYERS)})
    counters: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("tokens", "ubatches", "picks", "hits", "misses", "hit_bytes", "miss_bytes", "promotions",
             "promoted_bytes", "demotions", "given_back_bytes", "priors"), 0,
        )
    )  # fmt: skip
    snapshots: list[dict[str, int]] = field(default_factory=list)
    budget_bytes: int = LAYERS * EXPERTS * EXPERT_BYTES
    serial: int = 0


FAKE = web.AppKey("fake", Fake)


def error(status: int, message: str, kind: str) -> web.Response:
    """llama-server's error body."""
    return web.json_response({"error": {"code": status, "message": message, "type": kind}}, status=status)
