"""Owns engines as files: one machine builds, packs and hands on, others take in what they can check.

An archive is a gzipped tar: first ``engine.json`` (what went into the build, and for which platform), then
the engine's folder. Nothing of it is believed before it has the SHA-256 that the caller knows, nothing is
unpacked before ``engine.json`` suits this machine and this moe-proxy, and nothing appears in the cache before
all of it is there.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import re
import shutil
import tarfile
import tempfile
import urllib.error
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from moe_proxy.engine.cache import (
    RECORD,
    EngineBuild,
    engines_folder,
    fault_of,
    finished,
    install,
    lock_of,
    locked,
)
from moe_proxy.engine.compatibility import cuda_architectures, refusal
from moe_proxy.engine.recipe import BuildRequest, inputs_of, key_of
from moe_proxy.engine.source import Progress, download
from moe_proxy.engine.toolchain import check_disk, runtime_libraries, this_cpu
from moe_proxy.errors import BuildError, ConfigError
from moe_proxy.files import replacing
from moe_proxy.hardware import probe

FORMAT = "moe-proxy-engine/1"
_HEADER = "engine.json"
_FOLDERS = frozenset({"bin", "licenses"})
_HEADER_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20
# Far above any engine: what goes beyond it is no engine but a way to fill a disk.
_MOST_BYTES, _MOST_FILES = 16 << 30, 1000
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NO_ARCHIVE = "take one that moe-proxy build --export wrote"


@dataclass(frozen=True)
class _Header:
    """What ``engine.json`` says."""

    inputs: Mapping[str, Any]
    built_at_s: int
    glibc: str
    unpacked_bytes: int


def export_engine(engine: EngineBuild, path: Path, progress: Progress) -> str:
    """Write ``engine`` as an archive to ``path``; its SHA-256, as hex.

    A CUDA engine takes along the libraries of the toolkit that it was linked with. Two exports of one engine
    are the same bytes. Raises BuildError, and OSError when ``path`` cannot be written.
    """
    try:
        record = json.loads((engine.folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BuildError(
            f"cannot read {engine.folder / RECORD}: {error}", "build the engine again"
        ) from error
    libraries = runtime_libraries(engine.folder / "bin") if engine.cuda else {}
    members = [(f"bin/{name}", file) for name, file in libraries.items()]
    members += [(str(file.relative_to(engine.folder)), file) for file in _files(engine.folder)]
    members.sort()
    total_bytes = sum(file.lstat().st_size for _, file in members)
    header = {
        "format": FORMAT,
        "key": engine.key,
        "inputs": record["inputs"],
        "built_at_s": record["built_at_s"],
        "glibc": _glibc(),
        "unpacked_bytes": total_bytes,
    }
    with replacing(path) as temporary:
        with (
            temporary.open("wb") as raw,
            gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as tar,
        ):
            text = json.dumps(header, indent=2).encode()
            tar.addfile(_member(_HEADER, len(text)), io.BytesIO(text))
            done_bytes = 0
            for name, file in members:
                progress("pack", done_bytes / total_bytes)
                _add(tar, name, file)
                done_bytes += file.lstat().st_size
        with temporary.open("rb") as written:
            return _digest(written, "verify", progress)


def import_engine(source: str, sha256: str, cache_dir: Path, progress: Progress) -> EngineBuild:
    """Take the archive ``source`` (a file, or an http or https address) into the cache; the engine in it.

    Raises ConfigError when ``sha256`` is none, BuildError when the archive is another one, unsound, not for
    this machine or not of this moe-proxy's sources.
    """
    if not _SHA256.fullmatch(sha256.lower()):
        raise ConfigError(
            f"{sha256!r} is no SHA-256", "give the 64 hex digits that moe-proxy build --export printed"
        )
    engines = engines_folder(cache_dir)
    try:
        engines.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=engines, prefix=".import-") as folder:
            path = Path(source)
            if "://" in source:
                path = Path(folder) / "archive"
                download(source, path, progress)
            with path.open("rb") as file:
                found = _digest(file, "verify", progress)
                if found != sha256.lower():
                    raise BuildError(
                        f"{source} has SHA-256 {found}, not {sha256.lower()}",
                        "it is damaged or another file: do not use it",
                    )
                # What was verified is what is read: the same open file.
                file.seek(0)
                return _import(file, source, cache_dir, Path(folder) / "engine", progress)
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", error)
        raise BuildError(f"cannot fetch {source}: {reason}", "check the address and the network") from error
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error, UnicodeError) as error:
        raise BuildError(f"{source} is no engine archive: {error}", _NO_ARCHIVE) from error


def _import(file: IO[bytes], source: str, cache_dir: Path, staged: Path, progress: Progress) -> EngineBuild:
    with (
        gzip.GzipFile(fileobj=file) as unpacked,
        tarfile.open(fileobj=io.BufferedReader(_Bounded(unpacked, _MOST_BYTES)), mode="r|") as tar,
    ):
        header = _read_header(tar, source)
        _check_suits(header, source)
        key = key_of(header.inputs)
        with locked(lock_of(cache_dir, key), progress):
            there = finished(cache_dir, header.inputs)
            if there is not None:
                return there
            check_disk(engines_folder(cache_dir), header.unpacked_bytes)
            _unpack(tar, source, staged, header.unpacked_bytes, progress)
            server = staged / "bin" / "llama-server"
            if not server.is_file():
                raise BuildError(f"{source} has no bin/llama-server", _NO_ARCHIVE)
            progress("check", 0.0)
            fault = fault_of(server)
            # Without a driver a CUDA engine cannot be loaded; a container's image is made on such machines.
            if fault and not (header.inputs["cuda"] and not probe().gpus):
                raise BuildError(
                    f"the llama-server in {source} does not start here: {fault}",
                    "install what it lacks (libgomp.so.1 is in the package libgomp1), or build one here",
                )
            return install(
                staged, cache_dir, header.inputs, {"built_at_s": header.built_at_s, "imported": True}
            )


def _read_header(tar: tarfile.TarFile, source: str) -> _Header:
    """The first member. Raises BuildError unless it is a sound ``engine.json``."""
    member = tar.next()
    if member is None or member.name != _HEADER or not member.isreg() or member.size > _HEADER_BYTES:
        raise BuildError(f"{source} does not begin with {_HEADER}", _NO_ARCHIVE)
    content = tar.extractfile(member)
    assert content is not None
    try:
        body = json.loads(content.read())
        if body["format"] != FORMAT:
            raise BuildError(
                f"{source} is of format {body['format']!r}, this moe-proxy reads {FORMAT}",
                "export it again with this version",
            )
        header = _Header(
            dict(body["inputs"]), int(body["built_at_s"]), str(body["glibc"]), int(body["unpacked_bytes"])
        )
        for name in ("stock", "cuda"):
            if not isinstance(header.inputs[name], bool):
                raise ValueError(f"{name} is {header.inputs[name]!r}")
        if body["key"] != key_of(header.inputs):
            raise ValueError("its key is not that of what it says it was built from")
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise BuildError(f"{source} has an unsound {_HEADER}: {error!r}", _NO_ARCHIVE) from error
    if not 0 <= header.unpacked_bytes <= _MOST_BYTES:
        raise BuildError(f"{source} would take {header.unpacked_bytes} bytes", _NO_ARCHIVE)
    return header


def _check_suits(header: _Header, source: str) -> None:
    """Raise BuildError unless the engine is of our sources and for this machine."""
    cuda, stock = bool(header.inputs["cuda"]), bool(header.inputs["stock"])
    asked = ";".join(cuda_architectures(header.inputs))
    wanted = inputs_of(BuildRequest(Path(), cuda=cuda, cuda_architectures=asked, stock=stock))
    capabilities = [gpu.compute_capability for gpu in probe().gpus if gpu.compute_capability]
    why = refusal(header.inputs, wanted, this_cpu(), capabilities)
    if not why and _version(header.glibc) > _version(_glibc()):
        why = f"it needs glibc {header.glibc}, and this machine has {_glibc() or 'none'}"
    if why:
        raise BuildError(
            f"the engine in {source} is not for here: {why}",
            "export one from this version of moe-proxy, with --portable and --cuda-arch all if need be",
        )


def _unpack(tar: tarfile.TarFile, source: str, target: Path, most_bytes: int, progress: Progress) -> None:
    """Put the rest of ``tar`` into ``target``, which must not exist.

    Made are regular files under the known folders and at the top, and links to a file beside them. Everything
    else raises BuildError, so that a hostile archive leaves nothing behind.
    """
    target.mkdir()
    links: list[Path] = []
    seen: set[PurePosixPath] = set()
    done_bytes = 0
    while (member := tar.next()) is not None:
        name = PurePosixPath(member.name)
        if len(seen) >= _MOST_FILES or name in seen:
            raise BuildError(f"{source} has {member.name!r} twice, or too many files", _NO_ARCHIVE)
        seen.add(name)
        path = target / _safe(name, member.name, source)
        path.parent.mkdir(parents=True, exist_ok=True)
        if member.issym():
            # A plain name cannot lead out of the folder that the link is in.
            if member.linkname in ("", ".", "..") or "/" in member.linkname or "\0" in member.linkname:
                raise BuildError(f"{source} has a link from {name} to {member.linkname!r}", _NO_ARCHIVE)
            path.symlink_to(member.linkname)
            links.append(path)
            continue
        if not member.isreg() or member.issparse():
            raise BuildError(f"{source} has {name}, which is neither a file nor a link", _NO_ARCHIVE)
        done_bytes += member.size
        if done_bytes > most_bytes:
            raise BuildError(f"{source} is larger than it says ({most_bytes} bytes)", _NO_ARCHIVE)
        content = tar.extractfile(member)
        assert content is not None
        # Exclusively: nothing is written through a link, not even one that was made a moment ago.
        with content, path.open("xb") as sink:
            shutil.copyfileobj(content, sink, _CHUNK_BYTES)
        path.chmod(0o755 if member.mode & 0o100 else 0o644)
        progress("unpack", done_bytes / max(most_bytes, 1))
    for link in links:
        if not link.is_file():
            raise BuildError(f"{source} has a link {link.name} that leads nowhere", _NO_ARCHIVE)


def _safe(name: PurePosixPath, text: str, source: str) -> PurePosixPath:
    """``name`` if it lies where an engine has its files. Raises BuildError."""
    folder, file = name.parts[:-1], name.name
    known = folder in ((), *((one,) for one in _FOLDERS)) and file not in _FOLDERS
    # The text, too: PurePosixPath drops what a file system may not.
    if name.is_absolute() or ".." in name.parts or not known or str(name) != text or "\0" in text:
        raise BuildError(f"{source} has a file {text!r}, which no engine has", _NO_ARCHIVE)
    return name


def _files(folder: Path) -> Iterator[Path]:
    """What an archive carries of an engine's folder: all but its record, which ``engine.json`` stands for."""
    for path in sorted(folder.rglob("*")):
        if (path.is_symlink() or path.is_file()) and path != folder / RECORD:
            yield path


def _add(tar: tarfile.TarFile, name: str, path: Path) -> None:
    """One file or link, without what would tell machines or days apart."""
    if path.is_symlink() and "/" not in str(path.readlink()):
        member = _member(name, 0)
        member.type, member.linkname = tarfile.SYMTYPE, str(path.readlink())
        tar.addfile(member)
        return
    with path.open("rb") as content:
        size_bytes = os.fstat(content.fileno()).st_size
        member = _member(name, size_bytes)
        member.mode = 0o755 if os.access(path, os.X_OK) else 0o644
        tar.addfile(member, content)


def _member(name: str, size_bytes: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = size_bytes, 0, 0o644
    return member


def _digest(file: IO[bytes], stage: str, progress: Progress) -> str:
    digest, done_bytes = hashlib.sha256(), 0
    total_bytes = os.fstat(file.fileno()).st_size
    while block := file.read(_CHUNK_BYTES):
        digest.update(block)
        done_bytes += len(block)
        progress(stage, done_bytes / max(total_bytes, done_bytes))
    return digest.hexdigest()


def _glibc() -> str:
    """The version of the C library, "2.36"; "" where it is another one."""
    name, version = platform.libc_ver()
    return version if name == "glibc" else ""


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


class _Bounded(io.RawIOBase):
    """A stream that refuses to give more than ``left_bytes``: a small archive can unpack to a full disk."""

    def __init__(self, stream: gzip.GzipFile, left_bytes: int) -> None:
        self._stream, self._left_bytes = stream, left_bytes

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer``; the number of bytes. Raises tarfile.ReadError beyond the limit."""
        count = self._stream.readinto(buffer)
        self._left_bytes -= count
        if self._left_bytes < 0:
            raise tarfile.ReadError("it unpacks to more than any engine has")
        return count
