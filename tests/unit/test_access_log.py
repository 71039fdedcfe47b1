"""The access log: one line per request, as text or JSON, without what it was about."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace
from typing import Any

from moe_proxy.proxy.access_log import AccessRecord, access_log, json_line, text_line
from tests.support.surface import eventually, surface

RECORD = AccessRecord(
    1_700_000_000_123_000_000, "ab12", "127.0.0.1", "POST", "/api/chat", 200, 1.25, None, None
)
PROMPT = "write code about a purple giraffe"
CHAT: Any = {"model": "planted-moe", "messages": [{"role": "user", "content": PROMPT}]}


def test_lines() -> None:
    """Access log as text or JSON; a path cannot begin a line of its own or fill the disk."""
    assert text_line(RECORD) == (
        "2023-11-14T22:13:20.123Z ab12 127.0.0.1 POST /api/chat 200 1.250s first=- domain=-"
    )
    value = json.loads(json_line(replace(RECORD, first_token_s=0.5, domain="math")))
    assert value == {
        "time": "2023-11-14T22:13:20.123Z", "id": "ab12", "client": "127.0.0.1", "method": "POST",
        "path": "/api/chat", "status": 200, "duration_s": 1.25, "first_token_s": 0.5, "domain": "math",
    }  # fmt: skip
    hostile = replace(RECORD, path="/x\n\x1b[31m" + "y" * 10_000)
    for line in (text_line(hostile), json_line(hostile)):
        assert line.isprintable()
        assert len(line) < 500
    assert access_log("off") is None


async def test_every_request_leaves_one_line_without_its_prompt() -> None:
    """Access log without prompts: neither prompt, answer, query string nor key is in it; the id is."""
    out = io.StringIO()
    async with surface(access_log=access_log("json", out)) as proxy:
        headers = {"Authorization": "Bearer sk-secret"}
        _, answered, _ = await proxy.post("/v1/chat/completions?key=sk-secret", CHAT, headers=headers)
        await proxy.post("/api/chat", CHAT)
        await proxy.get("/nothing")
        await proxy.get("/api/tags", headers={"Host": "evil.com"})
        await eventually(lambda: out.getvalue().count("\n") == 4)
        lines = [json.loads(line) for line in out.getvalue().splitlines()]
        assert [(line["path"], line["status"]) for line in lines] == [
            ("/v1/chat/completions", 200), ("/api/chat", 200), ("/nothing", 404), ("/api/tags", 403),
        ]  # fmt: skip
        assert lines[0]["id"] == answered["X-Request-Id"]
        assert lines[0]["first_token_s"] is None
        assert 0 < lines[1]["first_token_s"] <= lines[1]["duration_s"]
        assert lines[0]["domain"] == "codegen"
        for hidden in ("giraffe", "sk-secret", proxy.fake.switches.reply):
            assert hidden not in out.getvalue()


async def test_a_client_that_went_away_is_499() -> None:
    """A client that goes away before the first byte leaves a line that says so."""
    out = io.StringIO()
    async with surface("--hang", access_log=access_log("json", out)) as proxy:
        asking = asyncio.create_task(proxy.post("/api/chat", CHAT))
        await eventually(lambda: proxy.fake.requests)
        asking.cancel()
        await eventually(lambda: out.getvalue())
        assert json.loads(out.getvalue())["status"] == 499


async def test_a_log_that_cannot_be_written_fails_no_request() -> None:
    """A full disk or a closed pipe is counted, and the client gets its answer."""

    def full(record: AccessRecord) -> None:
        raise OSError(28, "No space left on device")

    async with surface(access_log=full) as proxy:
        assert (await proxy.post("/api/chat", CHAT))[0] == 200
        assert (await proxy.get("/api/tags"))[0] == 200
        failures = proxy.context.metrics.requests()["step_failures"]
        assert failures == {"access log": 2}
