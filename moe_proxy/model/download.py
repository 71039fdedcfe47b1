"""Owns fetching a model from a hub: which files, room for them, going on after a break, their hashes.

A file lies in the models folder only when all of it is there and has the hash that the hub states. What
speaks to the hub is huggingface_hub; it is loaded when something is fetched, so that a serving process never
carries it. ``HF_ENDPOINT`` names another hub, ``HF_TOKEN`` a user of it: both are the library's to read.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from moe_proxy.errors import ConfigError, DownloadError
from moe_proxy.model.hub_name import HubName, missing_shards, model_sets, quant_of

Progress = Callable[[str, int, int], None]
"""Told of (what is done, bytes that are done, bytes in all)."""

# Taken where several quantisations are there and none was named: the customary middle of size and quality.
_USUAL_QUANT = "Q4_K_M"
_UNFINISHED = ".unfinished"
_SPARE_BYTES = 256 * 2**20
_CHUNK_BYTES = 1 << 20
_ANSWER_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class RemoteFile:
    """One file of a repository. ``sha256`` is empty where the hub states none."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class RemoteModel:
    """The files of one model at one commit of a repository."""

    repo: str
    commit: str
    files: tuple[RemoteFile, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)


def chosen(
    name: HubName, files: Sequence[RemoteFile], file_name: str | None = None
) -> tuple[RemoteFile, ...]:
    """The files of the model that ``name`` means, or of the one that ``file_name`` is of.

    Raises DownloadError for none, for several, and for a set of files that is not whole.
    """
    sets = model_sets(file.name for file in files)
    if file_name is not None:
        fitting = {stem: names for stem, names in sets.items() if file_name in (stem, *names)}
    else:
        wanted = name.quant.upper() if name.quant else None
        if wanted is None and len(sets) > 1:
            wanted = _USUAL_QUANT
        fitting = {stem: names for stem, names in sets.items() if wanted in (None, quant_of(stem))}
    if len(fitting) != 1:
        raise DownloadError(*_no_choice(name, sets, fitting, file_name))
    (names,) = fitting.values()
    if missing := missing_shards(names):
        raise DownloadError(
            f"{name.repo} lacks {missing} of the files of {names[0]}", "choose another --file"
        )
    return tuple(file for file in files if file.name in names)


def _no_choice(
    name: HubName,
    sets: dict[str, tuple[str, ...]],
    fitting: dict[str, tuple[str, ...]],
    file_name: str | None,
) -> tuple[str, str]:
    if not sets:
        return f"{name.repo} holds no GGUF model", "look for a repository whose name ends in GGUF"
    if fitting:
        return f"{name} is {len(fitting)} models", f"say which with --file: {', '.join(fitting)}"
    quants = sorted({quant for stem in sets if (quant := quant_of(stem))})
    if file_name is not None:
        return f"{name.repo} has no file {file_name}", f"it has {', '.join(sets)}"
    if name.quant is None:
        return f"{name.repo} holds {len(sets)} models", f"add one of {':'}{', :'.join(quants)}"
    return f"{name.repo} has no {name.quant}", f"it has {', '.join(quants) or ', '.join(sets)}"


def find(name: HubName, file_name: str | None = None, revision: str | None = None) -> RemoteModel:
    """Ask the hub what ``name`` means. Raises DownloadError."""
    from huggingface_hub import HfApi

    with _translated(name.repo):
        info = HfApi().model_info(
            name.repo, revision=revision, files_metadata=True, timeout=_ANSWER_TIMEOUT_S
        )
    files = [
        RemoteFile(sibling.rfilename, sibling.size or 0, sibling.lfs.sha256 if sibling.lfs else "")
        for sibling in info.siblings or ()
    ]
    return RemoteModel(name.repo, info.sha or revision or "main", chosen(name, files, file_name))


def download(model: RemoteModel, models_dir: Path, progress: Progress) -> Path:
    """Fetch what is missing of ``model`` into a folder of its own under ``models_dir``; its first file.

    What was fetched of a file before goes on where it ended. Raises DownloadError, ConfigError for a folder
    that cannot be written, OSError.
    """
    folder = models_dir / model.repo
    unfinished = models_dir / _UNFINISHED / model.repo
    for file in model.files:
        if not file.sha256 or file.size_bytes <= 0:
            raise DownloadError(
                f"the hub states no SHA-256 for {file.name}",
                "what cannot be checked is not taken; try another hub",
            )
        if not (folder / file.name).resolve().is_relative_to(folder.resolve()):
            raise DownloadError(f"{model.repo} names a file {file.name!r}", "it would lie outside its folder")
    missing = [file for file in model.files if not _is_whole(folder / file.name, file, progress)]
    parts = {file: unfinished / f"{file.name}.{file.sha256[:12]}" for file in missing}
    _make_folder(models_dir)
    check_room(models_dir, sum(file.size_bytes - _size(part) for file, part in parts.items()))
    for file, part in parts.items():
        _make_folder(part.parent)
        _fetch(model, file, part, progress)
    # Only now, so that a split model is never seen with some of its files.
    for file, part in parts.items():
        target = folder / file.name
        _make_folder(target.parent)
        part.replace(target)
    _tidy(models_dir / _UNFINISHED)
    return folder / min(file.name for file in model.files)


def _tidy(folder: Path) -> None:
    """Remove ``folder`` and those below that hold nothing; another download may be making one of them."""
    for path in sorted((folder, *folder.rglob("*")), reverse=True):
        with contextlib.suppress(OSError):  # it is no folder, or not empty
            path.rmdir()


def check_room(folder: Path, size_bytes: int) -> None:
    """Raise DownloadError where the disk of ``folder`` has no room; the folder need not be there yet."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if size_bytes > 0 and free < size_bytes + _SPARE_BYTES:
        raise DownloadError(
            f"{size_bytes >> 20:,} MiB are to come, and the disk of {there} has {free >> 20:,} MiB free",
            "make room, or name a folder on another disk with --to or MOE_PROXY_MODELS_DIR",
        )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be made ({error.strerror})",
            "set MOE_PROXY_MODELS_DIR to a folder you may write",
        ) from error


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _is_whole(path: Path, file: RemoteFile, progress: Progress) -> bool:
    """Whether the file is there already, with the right bytes."""
    if _size(path) != file.size_bytes:
        return False
    with path.open("rb") as stored:
        return _hashed(stored, file, progress).hexdigest() == file.sha256


def _hashed(stored: BinaryIO, file: RemoteFile, progress: Progress) -> hashlib._Hash:
    digest, done = hashlib.sha256(), 0
    while chunk := stored.read(_CHUNK_BYTES):
        digest.update(chunk)
        done += len(chunk)
        progress(f"checking {file.name}", done, file.size_bytes)
    return digest


class _Sink:
    """A file that is written to its end: it hashes what it gets, and reports it."""

    def __init__(self, stored: BinaryIO, file: RemoteFile, progress: Progress) -> None:
        self._stored, self._file, self._progress = stored, file, progress
        stored.seek(0)
        self._digest = _hashed(stored, file, progress)
        self.size_bytes = stored.tell()

    def write(self, data: bytes) -> int:
        """Append ``data``."""
        self._stored.write(data)
        self._digest.update(data)
        self.size_bytes += len(data)
        self._progress(self._file.name, self.size_bytes, self._file.size_bytes)
        return len(data)

    def tell(self) -> int:
        """Bytes that are there."""
        return self.size_bytes

    def seek(self, at: int) -> int:
        """Only to the beginning, by a hub that cannot go on in the middle; truncate follows."""
        return self._stored.seek(at)

    def truncate(self) -> int:
        """Forget what is there."""
        self._stored.truncate()
        self._stored.seek(0)
        self._digest = hashlib.sha256()
        self.size_bytes = 0
        return 0

    @property
    def sha256(self) -> str:
        """Of all that is there."""
        return self._digest.hexdigest()


def _fetch(model: RemoteModel, file: RemoteFile, part: Path, progress: Progress) -> None:
    """Fetch the rest of ``file`` into ``part``. Raises DownloadError; what came stays, unless it is wrong."""
    with part.open("a+b") as stored:
        try:
            fcntl.flock(stored, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DownloadError(
                f"{file.name} is being downloaded already", "wait for that download"
            ) from error
        if _size(part) > file.size_bytes:
            stored.truncate(0)
        sink = _Sink(stored, file, progress)
        with _translated(model.repo, sink, file):
            _read_on(model, file, sink)
        if sink.size_bytes == file.size_bytes and sink.sha256 == file.sha256:
            return
    part.unlink()
    raise DownloadError(
        f"{file.name} came with the SHA-256 {sink.sha256[:12]}..., and the hub states {file.sha256[:12]}...",
        "it was thrown away; download it again, or from another hub (HF_ENDPOINT)",
    )


def _read_on(model: RemoteModel, file: RemoteFile, sink: _Sink) -> None:
    """Ask for the rest as long as each answer brings some of it."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HTTPError
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers, disable_progress_bars

    disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    url = hf_hub_url(model.repo, file.name, revision=model.commit)
    while sink.size_bytes < file.size_bytes:
        before = sink.size_bytes
        try:
            http_get(
                url,
                cast(BinaryIO, sink),  # of a file, it uses what _Sink has
                resume_size=before,
                headers=build_hf_headers(),
                expected_size=file.size_bytes,
            )
        except HfHubHTTPError:
            raise
        except (HTTPError, OSError) as error:
            # Cut off. An error of this system has a number: no disk, no right.
            if getattr(error, "errno", None) is not None or sink.size_bytes <= before:
                raise


@contextlib.contextmanager
def _translated(repo: str, sink: _Sink | None = None, file: RemoteFile | None = None) -> Iterator[None]:
    """The library's errors as ours. With ``sink``: what has come of ``file`` stays."""
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        HTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except GatedRepoError as error:
        raise DownloadError(
            f"{repo} is given only to those who accepted its conditions",
            f"accept them at {ENDPOINT}/{repo}, and set HF_TOKEN to a token of yours",
        ) from error
    except RepositoryNotFoundError as error:
        raise DownloadError(
            f"there is no model {repo} at {ENDPOINT}",
            "check the name; for a private one set HF_TOKEN to a token that may read it",
        ) from error
    except RevisionNotFoundError as error:
        raise DownloadError(f"{repo} has no such revision", "check --revision, or leave it out") from error
    except HFValidationError as error:
        raise DownloadError(f"{repo} is no name of a model", "write it as OWNER/NAME") from error
    except OfflineModeIsEnabled as error:
        raise DownloadError("HF_HUB_OFFLINE is set", "unset it to download") from error
    except (HTTPError, OSError) as error:
        if getattr(error, "errno", None) is not None and not isinstance(error, HTTPError):
            raise
        status = getattr(getattr(error, "response", None), "status_code", None)
        what = (
            f"answered with status {status}"
            if status
            else f"does not answer ({str(error) or type(error).__name__})"
        )
        kept = ""
        if sink is not None and file is not None:
            kept = f"; {sink.size_bytes} of {file.size_bytes} bytes of {file.name} are here"
        cure = (
            "try again, it goes on where it ended"
            if kept
            else "check the network, and HF_ENDPOINT if it is set"
        )
        raise DownloadError(f"{ENDPOINT} {what}{kept}", cure) from error
