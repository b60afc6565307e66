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


PLAN = ("plan", "--model", "llama-3-8b", "--cluster", "H100-80G:8", "--workload", "seq_len=4096,global_batch=64")


def test_a_plan_is_made_and_told() -> None:
    shown = _call(*PLAN[:-1], f"{PLAN[-1]},precision=bf16", "--only", "micro_batch=1,2", "--quick")
    assert shown.exit_code == 0
    assert "why not otherwise" in shown.output
    assert "tier: predicted" in shown.output


def test_a_plan_that_fits_nowhere_ends_with_3() -> None:
    workload = "seq_len=8192,global_batch=8,precision=bf16"
    shown = _call("plan", "--model", "llama-3-405b", "--cluster", "A100-80G:8", "--workload", workload)
    assert shown.exit_code == 3
    assert "nothing fits" in shown.output


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        ((*PLAN[:4], "H100-80G", *PLAN[5:]), 1, "--cluster 'H100-80G' is not legal; legal: ACCELERATOR:DEVICES"),
        ((*PLAN[:4], "H1000:8", *PLAN[5:]), 1, "accelerator='H1000' is unknown; legal: A100-40G"),
        ((*PLAN[:4], "H100-80G:0", *PLAN[5:]), 1, "--cluster 'H100-80G:0' is not legal"),
        ((*PLAN[:-1], "seq_len"), 1, "--workload 'seq_len' is not of the form key=value"),
        ((*PLAN[:-1], "seq_len=-1"), 1, "workload.seq_len=-1 is not legal"),
        ((*PLAN[:-1], "phase=decode"), 1, "workload.phase=decode cannot be planned yet"),
        ((*PLAN[:2], "llama-4", *PLAN[3:]), 1, "model.preset='llama-4' is unknown"),
        ((*PLAN[:2], "missing.json", *PLAN[3:]), 1, "missing.json"),
        ((*PLAN, "--only", "tp"), 1, "--only 'tp' is not legal; legal: KEY=V1,V2"),
        ((*PLAN, "--only", "tp=two"), 1, "--only 'tp=two': 'two' is no whole number"),
        ((*PLAN, "--only", "sp=yes"), 1, "--only 'sp=yes': 'yes' is not legal; legal: true, false"),
        ((*PLAN, "--only", "schedule=zb"), 1, "schedule=zb is not legal; legal: gpipe"),
        ((*PLAN, "--objective", "speed"), 2, "--objective speed is not legal; legal: time, memory, cost"),
        ((*PLAN, "--json", "/proc/none/p.json"), 2, "--json /proc/none/p.json cannot be written"),
        (("predict", SPEC, "--on", "abacus"), 1, "accelerator='abacus' is unknown"),
        (("predict", SPEC, "--on", "H100-80G", "--set", "strategy.tp=8"), 3, "does not divide model.heads=4"),
    ],
)
def test_faults_of_planning_are_sentences(arguments: tuple[str, ...], code: int, sentence: str) -> None:
    shown = _call(*arguments)
    assert shown.exit_code == code
    assert sentence in shown.stderr
    assert "Traceback" not in shown.output


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
