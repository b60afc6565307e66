"""What the README says of times is what was measured, and the files it names exist."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
TIMES = json.loads((ROOT / "data/reference/times.json").read_text())


@pytest.mark.parametrize("row", TIMES["rows"], ids=lambda row: row["what"])
def test_every_time_is_the_measured_one(row: dict) -> None:
    assert f"| {row['what']} | {row['seconds'] / 60:.0f} min | {row['conditions']} |" in README


def test_no_other_time_is_told() -> None:
    told = re.findall(r"\| \d+ min \|", README)
    assert len(told) == len(TIMES["rows"])


_PATHS = re.findall(r"`((?:data|src|envs|tests|notebooks|paper)/[\w./-]+\.(?:py|yaml))`", README)


@pytest.mark.parametrize("path", _PATHS)
def test_every_file_that_is_named_exists(path: str) -> None:
    assert (ROOT / path).is_file()
