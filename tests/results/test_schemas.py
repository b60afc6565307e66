"""A table holds what its schema says, or it is refused in one sentence that names run, column and value."""

from __future__ import annotations

from typing import Any

import pytest

from hybridpar.results.schemas import KEYS, TABLES, TableError, checked

STEP: dict[str, Any] = {
    "run_id": "aa",
    "tier": "measured",
    "step": 1,
    "warmup": False,
    "seconds": 1.5,
    "seconds_min": 1,
    "loss": 5.5,
    "grad_norm": 0.1,
}


def test_what_fits_keeps_its_types_and_the_order_of_the_schema() -> None:
    frame = checked("steps", [STEP, STEP | {"step": 2}])
    assert list(frame.columns) == list(TABLES["steps"])
    assert [str(dtype) for dtype in frame.dtypes] == ["str", "str", "int64", "bool", *["float64"] * 4]


def test_no_row_is_a_table_too() -> None:
    frame = checked("steps", [])
    assert frame.empty
    assert str(frame["step"].dtype) == "int64"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": 1.5}, "run aa: step=1.5 is not legal; legal: int64"),
        ({"step": True}, "run aa: step=True"),
        ({"warmup": "no"}, "run aa: warmup='no' is not legal; legal: bool"),
        ({"warmup": 1}, "run aa: warmup=1"),
        ({"seconds": "3"}, "run aa: seconds='3'"),
        ({"seconds": float("nan")}, "run aa: seconds=nan"),
        ({"loss": "low"}, "run aa: loss='low' is not legal; legal: float64, or nothing"),
        ({"run_id": 3}, "run_id=3 is not legal; legal: str"),
        ({"tier": "guess"}, "Column 'tier'.*guess"),
        ({"seconds": -1.0}, "Column 'seconds'.*-1"),
        ({"colour": 1}, "run aa has the unknown column colour"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(TableError, match=words) as caught:
        checked("steps", [STEP | change])
    assert "\n" not in str(caught.value)


def test_a_missing_column_is_named() -> None:
    with pytest.raises(TableError, match="run aa lacks the column loss"):
        checked("steps", [{key: value for key, value in STEP.items() if key != "loss"}])


def test_two_rows_of_one_key_are_refused() -> None:
    with pytest.raises(TableError, match="not unique"):
        checked("steps", [STEP, STEP])


def test_nothing_may_stand_where_the_schema_says_so() -> None:
    row = {"run_id": "aa", "tier": "measured", "rank": 0, "dp": 0, "tp": 0, "pp": 0, "cp": 0}
    times = {"step_s_median": 1.0, "exposed_s": 0, "wire_bytes": 0}
    sizes = {name: None for name in TABLES["ranks"] if name.endswith("_bytes") and name not in times}
    assert checked("ranks", [row | times | sizes])["total_bytes"].isna().all()


def test_every_table_has_a_key_of_its_own_columns_and_every_measure_a_unit() -> None:
    assert KEYS.keys() == TABLES.keys()
    for name, columns in TABLES.items():
        assert set(KEYS[name]) <= columns.keys()
        assert {
            column for column, meaning in columns.items() if meaning.dtype == "float64" and not meaning.unit
        } == set()
        assert all(meaning.meaning for meaning in columns.values())
