"""The command line: a newcomer finds the way, and every fault is a sentence with its exit code, never a traceback."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hybridpar.cli import app

ROOT = Path(__file__).resolve().parents[1]
SPEC = str(ROOT / "data/specs/llama-toy-dp2-tp2.yaml")
COMMANDS = [command.callback.__name__.replace("_", "-") for command in app.registered_commands if command.callback]


def _call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_help_names_every_command() -> None:
    shown = _call("--help").output
    assert [name for name in COMMANDS if name not in shown] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    shown = _call(command, "--help")
    assert shown.exit_code == 0
    assert "Usage" in shown.output


def test_a_legal_spec_is_said_to_be_legal() -> None:
    shown = _call("check", SPEC)
    assert (shown.exit_code, shown.output.split(":")[0]) == (0, "legal")


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("check", SPEC, "--set", "strategy.tp=8"), 3, "does not divide model.heads=4; legal: 1, 2, 4"),
        (
            ("check", SPEC, "--set", "strategy.schedul=gpipe"),
            1,
            "strategy.schedul is not a known key (did you mean schedule?)",
        ),
        (("check", "missing.yaml"), 1, "missing.yaml cannot be read"),
        (("study", "missing.yaml"), 1, "missing.yaml cannot be read"),
        (("run", SPEC), 2, "--out"),
        (("parity", "--engine", "none"), 2, "--engine none is not legal; legal: torch, deepspeed"),
        (("departures", "--out", str(ROOT)), 2, "is a folder; legal: a file"),
        (("departures", "--out", "/proc/none/d.json"), 2, "--out /proc/none/d.json cannot be written"),
        (("collectives", "--out", "/proc/none/c.parquet"), 2, "--out /proc/none/c.parquet cannot be written"),
        (
            ("departures", "--out", "d.json", "--only", "none-such"),
            2,
            "--only none-such names none; names: pipeline clips by stage",
        ),
        (
            ("batch", str(ROOT / "data/studies/smoke.yaml"), "--only", "x"),
            2,
            "--only x is not legal; legal: torch-1-000",
        ),
    ],
)
def test_a_fault_is_one_sentence_with_its_exit_code(arguments: tuple[str, ...], code: int, sentence: str) -> None:
    shown = _call(*arguments)
    assert shown.exit_code == code
    assert sentence in shown.output
    assert "Traceback" not in shown.output


def test_an_illegal_run_is_a_folder_with_a_result(tmp_path: Path) -> None:
    shown = _call("run", SPEC, "--set", "strategy.tp=8", "--out", str(tmp_path / "run"))
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (shown.exit_code, result["outcome"]) == (3, "infeasible")
    assert "model.heads=4" in result["reason"]


def test_the_schema_is_json_or_a_list() -> None:
    assert json.loads(_call("schema").output)["title"] == "hybridpar run spec"
    assert "strategy:" in _call("schema", "--fields").output
