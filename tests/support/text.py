"""Owns the fixed prompts of the integration tests, and how a llama-server is asked for greedy text."""

from __future__ import annotations

import json
import socket
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

CODE = "Write a Python function that sorts a list of numbers and returns the largest value."
STORY = "Write a short story about an old lighthouse, a storm and the sea."
MATH = "Solve the equation 3 x + 7 = 22 and prove that the solution is unique."


class UnixConnection(HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=120)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket instead of a host."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def call(
    path: Path, method: str, target: str, body: Any = None, headers: dict[str, str] | None = None
) -> Any:
    """One JSON request to the server on the Unix socket ``path``; asserts that it answers 200."""
    connection = UnixConnection(path)
    try:
        payload = None if body is None else json.dumps(body)
        connection.request(method, target, payload, {"Content-Type": "application/json", **(headers or {})})
        response = connection.getresponse()
        answer = json.loads(response.read())
    finally:
        connection.close()
    assert response.status == 200, answer
    return answer


def greedy(path: Path, prompt: str, tokens: int = 64) -> str:
    """Greedy text of the server on ``path``; nothing is reused from an earlier request."""
    body = {
        "prompt": prompt,
        "n_predict": tokens,
        "temperature": 0,
        "cache_prompt": False,
        "ignore_eos": True,
    }
    return str(call(path, "POST", "/completion", body)["content"])
