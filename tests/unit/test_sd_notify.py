"""Word to a service manager: in which order, and that nothing depends on its being heard."""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moe_proxy.sd_notify import ServiceNotifier
from tests.support.proxy_process import ProxyProcess


@contextmanager
def _service_manager(address: str) -> Iterator[socket.socket]:
    """A datagram socket as systemd has one; reading waits half a minute at most."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + address[1:] if address.startswith("@") else address)
        listener.settimeout(30)
        yield listener


def _heard(listener: socket.socket) -> list[str]:
    return listener.recv(4096).decode().splitlines()


@pytest.mark.parametrize("kind", ["path", "abstract"])
async def test_what_is_said(tmp_path: Path, kind: str) -> None:
    """READY, RELOADING with its time and READY again, STOPPING: on a path or on an abstract socket."""
    address = str(tmp_path / "notify") if kind == "path" else f"@moe-proxy-test-{tmp_path}"
    with _service_manager(address) as listener:
        notifier = ServiceNotifier({"NOTIFY_SOCKET": address})
        await notifier.ready("m on http://127.0.0.1:1")
        assert _heard(listener) == ["READY=1", "STATUS=serving m on http://127.0.0.1:1"]
        before_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        async with notifier.reloading():
            said, when = _heard(listener)
            assert said == "RELOADING=1"
            assert int(when.removeprefix("MONOTONIC_USEC=")) >= before_us
        assert _heard(listener) == ["READY=1"]
        await notifier.stopping()
        assert "STOPPING=1" in _heard(listener)


async def test_a_reload_before_the_model_is_ready_says_nothing(tmp_path: Path) -> None:
    """READY after a reload would be a lie while the model still loads."""
    with _service_manager(str(tmp_path / "notify")) as listener:
        notifier = ServiceNotifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})
        async with notifier.reloading():
            pass
        await notifier.stopping()
        assert "STOPPING=1" in _heard(listener)


@pytest.mark.parametrize("address", ["", "nonsense", "/nowhere/notify", "@nobody-listens"])
async def test_nobody_has_to_listen(address: str, caplog: pytest.LogCaptureFixture) -> None:
    """Without a service manager nothing is said; one that does not hear is a line in the log, no failure."""
    with caplog.at_level(logging.WARNING):
        await ServiceNotifier({"NOTIFY_SOCKET": address}).ready("m")
    assert bool(caplog.records) == address.startswith(("/", "@"))


def test_the_life_of_a_service(proxy_env: dict[str, str], fake_server: Path, tmp_path: Path) -> None:
    """STATUS while loading, READY when the model is, RELOADING on SIGHUP, STOPPING on SIGTERM."""
    address = str(tmp_path / "n")
    with _service_manager(address) as listener:
        env = proxy_env | {"NOTIFY_SOCKET": address, "MOE_PROXY_MODEL": "planted-moe"}
        proxy = ProxyProcess.start(env, ("--engine", str(fake_server)), ())
        try:
            assert _heard(listener) == ["STATUS=loading planted-moe"]
            assert _heard(listener) == ["READY=1", f"STATUS=serving planted-moe on {proxy.url}"]
            proxy.process.send_signal(signal.SIGHUP)
            assert _heard(listener)[0] == "RELOADING=1"
            assert _heard(listener) == ["READY=1"]
            proxy.process.send_signal(signal.SIGTERM)
            assert _heard(listener)[0] == "STOPPING=1"
            assert proxy.process.wait(60) == 0
        finally:
            proxy.end()
