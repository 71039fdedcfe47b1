"""Owns where llama.cpp's source comes from: the pin, the PyPI archive, git, or a folder that was named.

Everything is verified before it is used. It never edits the source and never builds it.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import html
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from moe_proxy.errors import BuildError
from moe_proxy.files import replacing
from moe_proxy.resources import data_path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Progress = Callable[[str, float], None]

_DEFAULT_INDEX = "https://pypi.org/simple"
_SIMPLE_JSON = "application/vnd.pypi.simple.v1+json"
_ACCEPT = f"{_SIMPLE_JSON}, text/html;q=0.2"
_CHUNK_BYTES = 1 << 20
_NETWORK_TIMEOUT_S = 60
# At the top of the tree and of no use to a build of llama-server; vocabularies alone are half of the archive.
_UNUSED = frozenset(
    {".git", ".github", ".devops", "benches", "build", "docs", "gguf-py", "media", "models", "tests"}
)


class IndexFile(Protocol):
    """A file of a project on the package index, pinned by its hash."""

    @property
    def project(self) -> str:
        """The project that publishes it."""
        ...

    @property
    def archive(self) -> str:
        """Its name on the index, and here."""
        ...

    @property
    def sha256(self) -> str:
        """64 hex digits."""
        ...


@dataclass(frozen=True)
class Pin:
    """What LLAMA_CPP_VERSION says: one commit, and the archive that carries its tree under ``folder``."""

    commit: str
    git: str
    project: str
    archive: str
    sha256: str
    folder: str


def read_pin(path: Path | None = None) -> Pin:
    """Read LLAMA_CPP_VERSION (the one that ships, unless ``path``). Raises BuildError."""
    path = path or data_path("LLAMA_CPP_VERSION")
    try:
        return Pin(**tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise BuildError(f"cannot read {path}: {error}", "reinstall moe-proxy") from error


def tree_files(tree: Path) -> Iterator[Path]:
    """All files of a llama.cpp tree that a build may read, relative to it, in a fixed order."""
    for folder, folders, names in os.walk(tree):
        here = Path(folder).relative_to(tree)
        top = here == Path()
        folders[:] = sorted(
            name for name in folders if not (top and name in _UNUSED) and name != "__pycache__"
        )
        yield from (here / name for name in sorted(names) if not (top and name in _UNUSED))


def tree_hash(tree: Path) -> str:
    """SHA-256 over names and contents of ``tree_files``."""
    digest = hashlib.sha256()
    for name in tree_files(tree):
        path = tree / name
        content = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def check_tree(tree: Path) -> None:
    """Raise BuildError unless ``tree`` looks like llama.cpp with a server in it."""
    for name in ("CMakeLists.txt", "ggml/CMakeLists.txt", "src/llama.cpp", "tools/server/CMakeLists.txt"):
        if not (tree / name).is_file():
            raise BuildError(
                f"{tree} is not a llama.cpp source tree: it has no {name}",
                "name the folder that holds llama.cpp's own CMakeLists.txt",
            )


def copy_tree(source: Path, target: Path) -> None:
    """Copy ``tree_files`` of ``source``, which stays as it is. ``target`` must not exist."""
    for name in tree_files(source):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / name, target / name, follow_symlinks=False)


def unpack(archive: Path, folder: str, target: Path) -> None:
    """Put what lies under ``folder`` in a tar archive into ``target``. Raises BuildError on a bad archive.

    Names that would leave ``target``, links and devices are never made.
    """
    prefix = folder.rstrip("/") + "/"
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = member.name.removeprefix("./")
                if not member.isfile() or not name.startswith(prefix):
                    continue
                relative = Path(name.removeprefix(prefix))
                if relative.is_absolute() or ".." in relative.parts or relative.parts[0] in _UNUSED:
                    continue
                content = tar.extractfile(member)
                assert content is not None
                path = target / relative
                path.parent.mkdir(parents=True, exist_ok=True)
                with content, path.open("wb") as sink:
                    shutil.copyfileobj(content, sink, _CHUNK_BYTES)
                path.chmod(0o755 if member.mode & 0o100 else 0o644)
    except (tarfile.TarError, EOFError) as error:
        raise BuildError(f"cannot unpack {archive}: {error}", "delete it and build again") from error
    if not target.is_dir():
        raise BuildError(f"{archive} has no folder {folder}", "correct LLAMA_CPP_VERSION")


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, as hex."""
    digest = hashlib.sha256()
    with path.open("rb") as source:
        while block := source.read(_CHUNK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def pinned_source(target: Path, pin: Pin, downloads: Path, progress: Progress) -> None:
    """Put the pinned tree into ``target``: from the archive, or from git where no index can be asked.

    ``downloads`` is where the archive is kept. Raises BuildError with the reasons of both.
    """
    try:
        archive = fetch_archive(pin, downloads, progress)
    except SourceUnreachableError as no_index:
        progress("git", 0.0)
        try:
            fetch_git(pin, target)
        except BuildError as no_git:
            raise BuildError(
                f"cannot get llama.cpp: {no_index.message}; {no_git.message}",
                f"check the network, set PIP_INDEX_URL to a mirror of PyPI, put {pin.archive} into "
                f"{downloads}, or name a llama.cpp tree with --source",
            ) from no_git
        return
    progress("unpack", 0.0)
    unpack(archive, pin.folder, target)


def llama_cpp_tree(cache_dir: Path) -> Path:
    """The pinned tree, unpacked once under ``cache_dir`` and untouched, for whoever wants to read it.

    It is without the parts that no build reads (tests, models, docs). Raises BuildError.
    """
    pin = read_pin()
    downloads = cache_dir / "source"
    tree = downloads / f"llama.cpp-{pin.commit[:12]}"
    if not tree.is_dir():
        downloads.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=downloads, prefix=".tree-") as folder:
            partial = Path(folder) / tree.name
            pinned_source(partial, pin, downloads, lambda stage, fraction: None)
            # Somebody else may have made it meanwhile: theirs is the same.
            with contextlib.suppress(OSError):
                partial.rename(tree)
    return tree


def fetch_archive(pin: IndexFile, folder: Path, progress: Progress) -> Path:
    """The pinned archive in ``folder``: the one that lies there if it is intact, else from the package index.

    Raises BuildError when the index cannot be reached, has no such file, or the file has another hash.
    """
    path = folder / pin.archive
    if path.is_file() and file_sha256(path) == pin.sha256:
        return path
    for leftover in folder.glob(f".{pin.archive}.*"):
        leftover.unlink(missing_ok=True)
    try:
        url = _archive_url(pin)
        with replacing(path) as temporary:
            download(url, temporary, progress)
            found = file_sha256(temporary)
            if found != pin.sha256:
                raise BuildError(
                    f"{pin.archive} from {_without_user(url)} has SHA-256 {found}, pinned is {pin.sha256}",
                    "do not use it; check the package index that PIP_INDEX_URL names",
                )
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise SourceUnreachableError(f"{index_url()}: {getattr(error, 'reason', error)}") from error
    return path


class SourceUnreachableError(BuildError):
    """The package index could not be asked; another way may still work."""


def index_url() -> str:
    """The package index in use, without user name and password."""
    return _without_user(os.environ.get("PIP_INDEX_URL") or _DEFAULT_INDEX)


def fetch_git(pin: Pin, target: Path) -> None:
    """Check the pinned commit out of git into ``target``. Raises BuildError with git's own words."""
    git = shutil.which("git")
    if git is None:
        raise BuildError("git is not installed", "install git")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
        "GIT_TERMINAL_PROMPT": "0",
    }
    target.mkdir(parents=True)
    for arguments in (
        ["init", "--quiet"],
        ["fetch", "--quiet", "--depth", "1", pin.git, pin.commit],
        ["checkout", "--quiet", pin.commit],
    ):
        done = subprocess.run(
            [git, *arguments], cwd=target, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise BuildError(f"git {arguments[0]} {pin.git}: {(done.stderr.strip() or '?').splitlines()[-1]}")
    shutil.rmtree(target / ".git")


def _archive_url(pin: IndexFile) -> str:
    """Ask the project's simple index for the archive's address; JSON, or HTML from older mirrors."""
    index = (os.environ.get("PIP_INDEX_URL") or _DEFAULT_INDEX).rstrip("/")
    page = f"{index}/{pin.project}/"
    try:
        with _open(page, _ACCEPT) as answer:
            kind = answer.headers.get_content_type()
            body = answer.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        raise SourceUnreachableError(f"{_without_user(page)}: {error.code} {error.reason}") from error
    try:
        addresses = _json_addresses(body) if kind == _SIMPLE_JSON else _html_addresses(body)
    except (ValueError, KeyError, TypeError) as error:
        raise SourceUnreachableError(f"{_without_user(page)} is not a package index: {error!r}") from error
    if pin.archive not in addresses:
        raise SourceUnreachableError(f"{_without_user(page)} has no file {pin.archive}")
    return urllib.parse.urljoin(page, addresses[pin.archive])


def _json_addresses(body: str) -> dict[str, str]:
    return {entry["filename"]: entry["url"] for entry in json.loads(body)["files"]}


def _html_addresses(body: str) -> dict[str, str]:
    links = re.findall(r"""<a\s[^>]*href=["']([^"'#]+)[^"']*["'][^>]*>\s*([^<\s]+)\s*</a>""", body)
    return {name: html.unescape(link) for link, name in links}


def download(url: str, target: Path, progress: Progress) -> None:
    """Put what lies at ``url`` into ``target``. Raises BuildError for an address of another kind than http,
    https or file, urllib.error.URLError and ConnectionError for a network that fails.
    """
    with _open(url, "*/*") as answer, target.open("wb") as sink:
        total_bytes = int(answer.headers.get("Content-Length") or 0)
        done_bytes = 0
        while block := _read(answer):
            sink.write(block)
            done_bytes += len(block)
            progress("download", done_bytes / total_bytes if total_bytes else 0.0)
        if done_bytes < total_bytes:
            raise ConnectionError(f"the connection broke after {done_bytes} of {total_bytes} bytes")


def _read(answer: urllib.response.addinfourl) -> bytes:
    """One block; a broken connection is told apart from a full disk."""
    try:
        return answer.read(_CHUNK_BYTES)
    except OSError as error:
        raise ConnectionError(str(error)) from error


def _open(url: str, accept: str) -> urllib.response.addinfourl:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https", "file"):
        raise BuildError(
            f"{_without_user(url)} is not an http, https or file address",
            "correct it, or PIP_INDEX_URL if that named it",
        )
    request = urllib.request.Request(_without_user(url), headers={"Accept": accept})  # noqa: S310
    if parts.username:
        pair = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        request.add_header("Authorization", "Basic " + base64.b64encode(pair.encode()).decode())
    # The same certificates as pip uses, for machines behind a proxy that has its own.
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT") or None)
    answer: urllib.response.addinfourl = urllib.request.urlopen(  # noqa: S310
        request, timeout=_NETWORK_TIMEOUT_S, context=context
    )
    return answer


def _without_user(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
