"""Preflight tells what a machine lacks for a study, and how to mend it, before anything is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hybridpar import preflight
from hybridpar.preflight import Finding, inspect

ALL = frozenset({"torch", "deepspeed"})


def _named(findings: tuple[Finding, ...]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_this_machine_is_fit_for_a_toy_study(tmp_path: Path) -> None:
    findings = inspect(1, tmp_path, frozenset({"torch"}))
    assert [finding.name for finding in findings if not finding.ok] == []


def test_a_study_too_large_for_the_memory_is_told_before_it_starts(tmp_path: Path) -> None:
    memory = _named(inspect(100_000, tmp_path, ALL))["memory"]
    assert not memory.ok
    assert memory.remedy.startswith("free ")


def test_ranks_beyond_the_cores_are_said_and_are_no_fault(tmp_path: Path) -> None:
    cores = _named(inspect(100_000, tmp_path, ALL))["cores"]
    assert cores.ok
    assert "which share them" in cores.seen


def test_a_missing_package_is_told_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise preflight.PackageNotFoundError(name)

    monkeypatch.setattr(preflight, "version", missing)
    findings = _named(inspect(1, tmp_path, ALL))
    assert (findings["deepspeed"].ok, findings["deepspeed"].remedy) == (False, "run make env")


def test_deepspeed_is_looked_for_only_where_a_run_uses_it(tmp_path: Path) -> None:
    assert "deepspeed" not in _named(inspect(1, tmp_path, frozenset({"torch"})))


def test_the_disk_is_looked_at_where_the_results_will_be(tmp_path: Path) -> None:
    assert _named(inspect(1, tmp_path / "not" / "yet" / "there", ALL))["disk"].seen.endswith("GiB free")


def test_looking_starts_no_torch() -> None:
    code = "import sys, hybridpar.preflight; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
