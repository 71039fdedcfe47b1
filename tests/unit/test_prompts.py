"""The text that is classified."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_proxy.prompts import TEXT_CHARACTERS, text_of


def _text(path: str, body: Any) -> str | None:
    return text_of(path, json.dumps(body).encode())


MESSAGES = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "not mine"},
    {"role": "user", "content": "last"},
]


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}, "last\nfirst\nbe kind"),
        ("/api/chat", {"messages": MESSAGES}, "last\nfirst\nbe kind"),
        ("/v1/messages", {"system": "be kind", "messages": MESSAGES[1:]}, "last\nfirst\nbe kind"),
        ("/v1/messages", {"system": [{"type": "text", "text": "s"}], "messages": MESSAGES[3:]}, "last\ns"),
        ("/v1/responses", {"input": "ask", "instructions": "be kind"}, "ask\nbe kind"),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]},
            "a",
        ),
        ("/v1/completions", {"prompt": "go on"}, "go on"),
        ("/v1/completions", {"prompt": ["one", "two"]}, "one\ntwo"),
        ("/api/generate", {"prompt": "go", "suffix": "on", "system": "s"}, "go\non\ns"),
        ("/completion", {"prompt": {"prompt_string": "see", "multimodal_data": ["AAAA"]}}, "see"),
        ("/infill", {"input_prefix": "def f(", "input_suffix": "return"}, "def f(\nreturn"),
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "what is this"},
                            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                        ],
                    }
                ]
            },
            "what is this",
        ),
    ],
)
def test_last_user_turn_first(path: str, body: Any, text: str) -> None:
    """The last user turn comes first, then earlier turns and the system prompt, in every family's body."""
    assert _text(path, body) == text


@pytest.mark.parametrize(
    "body",
    [b"", b"nothing", b"[]", b"null", b"\xff", b'{"messages": 3}', b'{"messages": []}', b'{"prompt": [1, 2]}',
     b'{"messages": [{"role": "user"}, 3, null]}', b'{"input": {"a": 1}}', b"[" * 100_000],
)  # fmt: skip
def test_no_text(body: bytes) -> None:
    """None when there is no text or the body is not understood."""
    assert text_of("/v1/chat/completions", body) is None


def test_bounded() -> None:
    """The text is bounded, and a long last turn leaves room for others and keeps both its ends."""
    turns = [{"role": "user", "content": f"{number:06}" * 3000} for number in range(50)]
    turns.append({"role": "user", "content": "BEGIN" + "x" * 100_000 + "END"})
    text = _text("/api/chat", {"messages": turns})
    assert text is not None
    assert len(text) <= TEXT_CHARACTERS
    assert text.startswith("BEGIN")
    assert "END\n" in text
    assert "000049" in text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["messages", "role", "content", "text", "prompt", "input", "system", "user"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(st.sampled_from(["/v1/chat/completions", "/v1/responses", "/api/generate", "/infill"]), JSON)
def test_never_fails(path: str, value: Any) -> None:
    """No body fails: whatever JSON it is, there is a text or None."""
    text = _text(path, value)
    assert text is None or (text != "" and len(text) <= TEXT_CHARACTERS)
