"""Departures of DeepSpeed are experiments: each is run, and says so where it departs no more."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hybridpar.departures import Departure, departures, measure, recorded
from hybridpar.legality import infeasible_reason
from hybridpar.parity import Parity

KNOWN = {departure.name: departure for departure in departures()}
QUICK = ("Ulysses loss at ZeRO-0", "experts with ZeRO-3")


@pytest.fixture(scope="module")
def parity() -> Parity:
    return Parity()


def test_names_are_unique_and_every_one_says_what_is_set_what_happens_and_what_is_right() -> None:
    assert len(KNOWN) == len(departures())
    for departure in departures():
        assert departure.setting
        assert departure.differs
        assert departure.right


@pytest.mark.parametrize("departure", departures(), ids=lambda departure: departure.name)
def test_the_right_setting_is_legal_so_that_no_study_departs(departure: Departure) -> None:
    assert infeasible_reason(departure.correct.run, on_text=False) is None


@pytest.mark.parametrize("name", QUICK)
def test_a_departure_departs_beside_the_setting_that_does_not(parity: Parity, name: str) -> None:
    row = measure(KNOWN[name], parity)
    assert row["reproduced"], row
    assert row["departing_verdict"] in ("differs", "refused")
    assert row["correct_verdict"] == "equal"
    assert (row["departing_reason"] is None) == (row["departing_verdict"] == "differs")


def test_what_departs_no_more_is_a_row_that_says_so(parity: Parity) -> None:
    known = KNOWN[QUICK[0]]
    row = measure(replace(known, departing=known.correct), parity)
    assert (row["departing_verdict"], row["reproduced"]) == ("equal", False)
    assert json.loads(json.dumps(recorded([row])))["tier"] == "measured"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(set(KNOWN) - set(QUICK)))
def test_every_other_departure_departs(parity: Parity, name: str) -> None:
    row = measure(KNOWN[name], parity)
    assert row["reproduced"], row


def test_what_is_changed_in_the_process_is_put_back(parity: Parity) -> None:
    measure(KNOWN[QUICK[0]], parity)
    assert parity.compare(KNOWN[QUICK[0]].correct.run).verdict == "equal"
