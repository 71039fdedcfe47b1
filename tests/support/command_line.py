"""Owns running the command line inside the test's own process."""

from __future__ import annotations

import sys

import pytest

from moe_proxy import cli


def run_main(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    """Run ``moe-proxy ARGS`` to its end; its exit code."""
    monkeypatch.setattr(sys, "argv", ["moe-proxy", *args])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code
