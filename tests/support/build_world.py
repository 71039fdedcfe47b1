"""Owns a made-up world for builds: source archive and index, one patch, one native file, stub programs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from moe_proxy.engine import build as build_module
from moe_proxy.engine import recipe, source
from moe_proxy.engine.build import BuildRequest, EngineBuild, build_engine
from moe_proxy.engine.source import Pin
from moe_proxy.engine.toolchain import Toolchain

PATIENCE_S = 20.0
FOLDER = "pkg-1/vendor/llama.cpp"
TREE = {
    "CMakeLists.txt": "one\ntwo\nthree\nfour\nfive\n",
    "ggml/CMakeLists.txt": "ggml\n",
    "src/llama.cpp": "int main;\n",
    "tools/server/CMakeLists.txt": "server\n",
    "LICENSE": "MIT\n",
    "models/vocab.gguf": "large\n",
}
PATCH = """A made-up patch.

diff --git a/CMakeLists.txt b/CMakeLists.txt
--- a/CMakeLists.txt
+++ b/CMakeLists.txt
@@ -1,4 +1,5 @@
 one
 two
+add_subdirectory(native)
 three
 four
"""
CMAKE = """#!/bin/sh
# cmake -S TREE -B BUILD ...
echo "$@" >> {calls}/cmake
[ -e {calls}/cmake-fails ] && [ -e "$4/stale" ] && echo "CMake Error: stale" && exit 1
[ -e {calls}/cmake-always-fails ] && echo "-- looking" && echo "CMake Error at x: no header" && exit 1
mkdir -p "$4/bin"
"""
NINJA = """#!/bin/sh
# ninja -C BUILD -j N llama-server
touch "$2/a.o"
echo $$ >> {calls}/ninja
echo "[1/2] Building a.o"
if [ -e {calls}/ninja-hangs ]; then sleep 600 & wait; fi
if [ -e {calls}/ninja-fails ]; then
  echo "FAILED: [code=1] b.o"
  printf 'c++ %0500d\\n' 0
  echo "b.cpp:1:1: error: it is wrong"
  echo "ninja: build stopped: subcommand failed."
  exit 1
fi
echo "[2/2] Linking llama-server"
printf '#!/bin/sh\\necho devices\\n' > "$2/bin/llama-server"
chmod +x "$2/bin/llama-server"
echo lib > "$2/bin/libllama.so.1"; ln -sf libllama.so.1 "$2/bin/libllama.so"
echo no > "$2/bin/other"
"""


def write(folder: Path, files: dict[str, str]) -> Path:
    """Make ``files`` under ``folder``."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@dataclass
class Index:
    """A package index on this machine; fields say how it answers."""

    archive: bytes
    name: str
    kind: str = "json"
    length_lie: int = 0
    served: list[str] = field(default_factory=list)

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Status, content type and body."""
        self.served.append(path)
        if path == "/simple/pkg/" and self.kind == "json":
            files = [{"filename": self.name, "url": f"../../files/{self.name}", "hashes": {}}]
            return 200, "application/vnd.pypi.simple.v1+json", json.dumps({"files": files}).encode()
        if path == "/simple/pkg/" and self.kind == "html":
            link = f'<a href="/files/{self.name}#sha256=00">{self.name}</a>'
            return 200, "text/html", f"<html><body>{link}</body></html>".encode()
        if path == f"/files/{self.name}":
            return 200, "application/gzip", self.archive
        return 404, "text/plain", b"no"


class Handler(BaseHTTPRequestHandler):
    """Serves an Index."""

    def __init__(self, index: Index, *args: object) -> None:
        self.index = index
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Answer."""
        status, kind, body = self.index.answer(self.path)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        lie = self.index.length_lie if self.path.startswith("/files") else 0
        self.send_header("Content-Length", str(len(body) + lie))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Be quiet."""


@dataclass
class World:
    """Everything that a build meets, made up."""

    root: Path
    pin: Pin
    index: Index
    toolchain: Toolchain
    stages: list[str] = field(default_factory=list)
    cpu: str = "cpu"

    @property
    def cache(self) -> Path:
        """The cache directory."""
        return self.root / "cache"

    @property
    def archive(self) -> Path:
        """Where the archive is kept."""
        return self.cache / "source" / self.pin.archive

    def request(self, **changes: object) -> BuildRequest:
        """A build for this world."""
        return dataclasses.replace(BuildRequest(self.cache, jobs=1), **changes)  # type: ignore[arg-type]

    def progress(self, stage: str, fraction: float) -> None:
        """Note the stage."""
        assert 0 <= fraction <= 1
        if self.stages[-1:] != [stage]:
            self.stages.append(stage)

    def build(self, **changes: object) -> EngineBuild:
        """Build."""
        return build_engine(self.request(**changes), self.progress)

    def calls(self, program: str) -> list[str]:
        """How a stub was called, or its pids."""
        path = self.root / "calls" / program
        return path.read_text().splitlines() if path.exists() else []

    def switch(self, name: str, on: bool = True) -> None:
        """Make a stub misbehave."""
        path = self.root / "calls" / name
        path.touch() if on else path.unlink()

    def key(self, **changes: object) -> str:
        """The key of a request."""
        inputs = recipe.inputs_of(self.request(**changes))
        return recipe.key_of({**inputs, "compiler": self.toolchain.compiler_version})


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that must come; the bound only turns a hang into a failure."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


@contextmanager
def made_up_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A world whose package index is up."""
    packed = write(tmp_path / "pack", {f"{FOLDER}/{name}": text for name, text in TREE.items()})
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        tar.add(packed / "pkg-1", "pkg-1")
    content = (tmp_path / "a.tar.gz").read_bytes()
    pin = Pin(
        "c" * 40, str(tmp_path / "git"), "pkg", "pkg-1.tar.gz", hashlib.sha256(content).hexdigest(), FOLDER
    )
    data = write(
        tmp_path / "data",
        {
            "patches/series": "# first\n0001-x.patch  # why\n",
            "patches/0001-x.patch": PATCH,
            "native/src/a.cpp": "a\n",
            "native/tests/t.cpp": "t\n",
        },
    )
    (tmp_path / "calls").mkdir()
    programs = write(tmp_path / "programs", {"cmake": CMAKE, "ninja": NINJA})
    for path in programs.iterdir():
        path.write_text(path.read_text().replace("{calls}", str(tmp_path / "calls")))
        path.chmod(0o755)
    tools = Toolchain(programs / "cmake", programs / "ninja", Path("/cc"), Path("/c++"), "c++ 1.0")
    made = World(tmp_path, pin, Index(content, pin.archive), tools)
    for module in (build_module, recipe, source):
        monkeypatch.setattr(module, "read_pin", lambda: made.pin)
        if hasattr(module, "data_path"):
            monkeypatch.setattr(module, "data_path", lambda name: data / name)
    monkeypatch.setattr(build_module, "find_toolchain", lambda cuda: made.toolchain)
    for module in (build_module, recipe):
        monkeypatch.setattr(module, "this_cpu", lambda: made.cpu)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, made.index)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
        yield made
        server.shutdown()
        thread.join()
