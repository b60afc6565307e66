"""The environments agree with one another and with what the package asks for; set-up says what is wrong."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
ENVS = ROOT / "envs"


def _asked() -> dict[str, Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = project["dependencies"] + project["optional-dependencies"]["dev"]
    return {_normal(requirement.name): requirement for requirement in map(Requirement, texts)}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _pins(lines: list[str]) -> dict[str, str]:
    found = [Requirement(line) for line in lines]
    assert all(re.fullmatch(r"==[^*+]+", str(pin.specifier)) for pin in found), "one exact version each"
    return {_normal(pin.name): str(pin.specifier)[2:] for pin in found}


def _lock() -> dict[str, str]:
    lines = (ENVS / "lock.txt").read_text().splitlines()
    return _pins([line for line in lines if line.strip() and not line.lstrip().startswith("#")])


def test_the_lock_pins_all_that_the_project_asks_for() -> None:
    lock = _lock()
    for name, requirement in _asked().items():
        assert requirement.specifier.contains(lock[name], prereleases=True), requirement


def test_the_lock_names_no_host_and_no_platform() -> None:
    text = (ENVS / "lock.txt").read_text()
    assert "://" not in text
    assert not re.search(r"^\s*--", text, flags=re.MULTILINE)
    assert _lock()["torch"] == "2.13.0"


def test_what_is_installed_is_what_the_lock_says() -> None:
    lock = _lock()
    assert {name: version(name).partition("+")[0] for name in _asked()} == {name: lock[name] for name in _asked()}


def test_conda_has_the_pins_of_the_lock() -> None:
    *conda, pip = yaml.safe_load((ENVS / "conda.yml").read_text())["dependencies"]
    assert _pins(pip["pip"]) == _lock()
    build = _pins((ENVS / "build.txt").read_text().splitlines()[1:])
    assert conda == ["python=3.11", f"pip={build['pip']}"]
    assert build["wheel"] == _lock()["wheel"]


def test_every_rule_that_executes_has_a_log_and_an_environment_that_exists() -> None:
    for path in (ROOT / "src" / "rules").glob("*.smk"):
        text = path.read_text()
        assert text.count("shell:") == text.count("log:") == text.count("conda:")
        for file in re.findall(r'conda:\s+"([^"]+)"', text):
            assert (path.parent / file).is_file()


@pytest.mark.parametrize("name", ["local", "slurm"])
def test_profiles_rerun_for_content_and_never_for_the_wording_of_rules(name: str) -> None:
    profile = yaml.safe_load((ENVS / "profiles" / name / "config.yaml").read_text())
    assert set(profile["rerun-triggers"]) == {"mtime", "params", "input"}
    assert profile["rerun-incomplete"] is True


def _make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ENVS, folder / "envs")
    return subprocess.run(["make", *words], cwd=folder, capture_output=True, text=True, check=False)


def _python(folder: Path, *, old: bool) -> Path:
    """A python that is too old, or one without venv."""
    path = folder / "python"
    refuses = "sys.version_info" if old else "ensurepip"
    path.write_text(f'#!/bin/sh\ncase "$*" in *{refuses}*) exit 1;; --version) echo Python 3.9.2;; esac\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("old", "sentence"),
    [(True, "needs Python 3.11 or newer"), (False, "cannot make virtual environments; install its venv package")],
)
def test_set_up_says_what_the_machine_lacks_and_builds_nothing(tmp_path: Path, old: bool, sentence: str) -> None:
    done = _make(tmp_path, "env", f"PYTHON={_python(tmp_path, old=old)}")
    assert done.returncode != 0
    assert sentence in done.stdout
    assert not (tmp_path / ".venv").exists()


def test_set_up_says_that_there_is_no_python(tmp_path: Path) -> None:
    done = _make(tmp_path, "env", "PYTHON=no-such-python")
    assert "there is no no-such-python" in done.stdout


def test_make_alone_lists_every_target_with_what_it_does(tmp_path: Path) -> None:
    targets = set(re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)[1].split())
    listed = re.findall(r"^  make ([a-z-]+) +\S.*", _make(tmp_path).stdout, flags=re.MULTILINE)
    assert set(listed) == targets


def test_continuous_integration_runs_the_tests_and_a_study() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert {"make test", "make smoke"} <= set(script.read_text().splitlines())
