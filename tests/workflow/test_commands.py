"""The rules call commands and options that the command line has."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from hybridpar.cli import app

RULES = Path(__file__).parents[2] / "src" / "rules"


def _calls() -> list[tuple[str, set[str]]]:
    """Command and options of each shell line; a string broken over lines is one call."""
    found = []
    for path in sorted(RULES.glob("*.smk")):
        for shell in re.findall(r'shell:\n((?: +"[^"\n]*"\n)+)', path.read_text()):
            line = "".join(re.findall(r'"([^"\n]*)"', shell))
            command = re.match(r"hybridpar ([\w-]+)", line)
            assert command, line
            found.append((command[1], set(re.findall(r"--[a-z-]+", line))))
    return found


def test_every_call_of_a_rule_is_one_the_command_line_takes() -> None:
    group = typer.main.get_command(app)
    calls = _calls()
    assert {command for command, _ in calls} == {
        *("corpus", "batch", "collectives", "departures", "tables", "check-theory"),
        *("notebook", "numbers", "paper", "report"),
    }
    for command, options in calls:
        parameters = group.commands[command].params
        known = {option for parameter in parameters for option in parameter.opts}
        needed = {parameter.opts[0] for parameter in parameters if parameter.required and parameter.opts[0][0] == "-"}
        assert needed <= options <= known, command
