"""A study file becomes runs, each once; what is wrong with it is said in sentences."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from textwrap import dedent

import pytest

from hybridpar.legality import infeasible_reason
from hybridpar.parity_layouts import SCHEDULES
from hybridpar.specs import SpecError
from hybridpar.study import Study, Theory, batches, factorise, load_study

STUDIES = Path(__file__).parents[1] / "data" / "studies"


def _study(folder: Path, text: str) -> Study:
    path = folder / "some.yaml"
    path.write_text(dedent(text))
    return load_study(path)


def _faults(folder: Path, text: str) -> tuple[str, ...]:
    with pytest.raises(SpecError) as caught:
        _study(folder, text)
    return caught.value.faults


TINY = """
    name: tiny
    defaults: {workload: {seq_len: 32, global_batch: 4}, cluster: {deadline_s: 60}}
    sweeps:
      - name: single
        models: [llama-toy, {preset: mamba2-toy, layers: 2}]
        workload: {steps: 3}
        strategies: [{}, {dp: 2}]
        repeats: 2
      - name: hybrids
        models: [llama-toy]
        workload: {steps: 3}
        factorisations: [{devices: [2], axes: [dp, tp, pp]}]
"""


def test_a_sweep_is_models_by_strategies_by_repeats(tmp_path: Path) -> None:
    single = [cell for cell in _study(tmp_path, TINY).cells if "single" in cell.sweeps]
    assert Counter((cell.run.model.name, cell.run.strategy.label, cell.run.repeat) for cell in single) == Counter(
        (model, strategy, repeat)
        for model in ("llama-toy", "mamba2-toy")
        for strategy in ("one-device", "dp2")
        for repeat in (0, 1)
    )


def test_a_study_says_how_much_of_theory_it_compares(tmp_path: Path) -> None:
    assert _study(tmp_path, f"{TINY}    theory: {{layouts: 2, random: 0}}\n").theory == Theory(layouts=2, random=0)
    assert _study(tmp_path, TINY).theory == Theory()
    (fault,) = _faults(tmp_path, f"{TINY}    theory: {{layouts: -1}}\n")
    assert "theory.layouts" in fault


def test_a_sweep_goes_over_the_defaults_and_a_model_over_its_preset(tmp_path: Path) -> None:
    run = next(run for run in _study(tmp_path, TINY).runs if run.model.name == "mamba2-toy")
    assert (run.workload.seq_len, run.workload.steps, run.cluster.deadline_s, run.model.layers) == (32, 3, 60, 2)


def test_a_run_of_two_sweeps_is_made_once_and_belongs_to_both(tmp_path: Path) -> None:
    study = _study(tmp_path, TINY)
    assert len({run.run_id for run in study.runs}) == len(study.runs) == 8 + 3 - 1
    shared = [cell for cell in study.cells if len(cell.sweeps) > 1]
    assert [(cell.run.model.name, cell.run.strategy.label, cell.sweeps) for cell in shared] == [
        ("llama-toy", "dp2", ("single", "hybrids"))
    ]


def test_the_repeats_of_a_cell_lie_apart(tmp_path: Path) -> None:
    repeats = [run.repeat for run in _study(tmp_path, TINY).runs]
    assert repeats == sorted(repeats)
    assert 1 in repeats


def test_the_factorisations_of_eight_over_three_axes_are_ten() -> None:
    found = list(factorise(8, 3))
    assert len(found) == len(set(found)) == 10
    assert all(a * b * c == 8 for a, b, c in found)
    assert list(factorise(6, 2)) == [(1, 6), (2, 3), (3, 2), (6, 1)]


def test_an_illegal_factorisation_stays_in_the_study(tmp_path: Path) -> None:
    study = _study(
        tmp_path,
        "{name: x, sweeps: [{name: a, models: [llama-toy], factorisations: [{devices: [8], axes: [tp, pp]}]}]}",
    )
    assert {run.strategy.label: infeasible_reason(run) is None for run in study.runs} == {
        "tp8": False,
        "tp2-pp4-1f1b": True,
        "tp4-pp2-1f1b": True,
        "pp8-1f1b": False,
    }


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[1]", "a study is a mapping with the keys name, defaults, sweeps"),
        ("{name: x, sweeps: []}", "sweeps=[] is not legal"),
        ("{name: a/b, sweeps: [{name: a, models: [llama-toy], strategies: [{}]}]}", "name='a/b' is not legal"),
        (
            "{name: x, sweep: [], sweeps: [{name: a, models: [llama-toy], strategies: [{}]}]}",
            "sweep is not a known key",
        ),
        (
            "{name: x, sweeps: [{name: a, models: [llama-toy], strategys: [{}]}]}",
            "sweeps.0.strategys is not a known key (did you mean strategies?)",
        ),
        ("{name: x, sweeps: [{name: a, models: [llama-toy]}]}", "sweep a has no run"),
        (
            "{name: x, sweeps: [{name: a, models: [llama-toi], strategies: [{}]}]}",
            "sweep a: model.preset='llama-toi' is unknown (did you mean llama-toy?)",
        ),
        (
            "{name: x, sweeps: [{name: a, models: [llama-toy], strategies: [{schedul: 1f1b}]}]}",
            "sweep a: strategy.schedul is not a known key (did you mean schedule?)",
        ),
        (
            "{name: x, defaults: {workload: {seqlen: 3}}, sweeps: [{name: a, models: [llama-toy], strategies: [{}]}]}",
            "workload.seqlen is not a known key (did you mean seq_len?)",
        ),
        (
            "{name: x, sweeps: [{name: a, models: [llama-toy], strategies: [{}], repeats: 0}]}",
            "sweeps.0.repeats=0 is not legal",
        ),
        (
            "{name: x, sweeps: [{name: a, models: [llama-toy], factorisations: [{devices: [4], axes: [dp, dp]}]}]}",
            "names dp twice",
        ),
        (
            "{name: x, sweeps: [{name: a, models: [llama-toy],"
            " factorisations: [{devices: [4], axes: [dp, tp], strategy: {tp: 2}}]}]}",
            "strategy sets tp, which axes=['dp', 'tp'] varies",
        ),
        (
            "{name: x, sweeps: [{name: a, models: [llama-toy], strategies: [{}]},"
            " {name: a, models: [llama-toy], strategies: [{dp: 2}]}]}",
            "sweep a is there twice",
        ),
        ("{name: x, sweeps: [", "is not valid YAML at line"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence_that_names_the_file(tmp_path: Path, text: str, sentence: str) -> None:
    faults = _faults(tmp_path, text)
    assert len(faults) == 1
    assert sentence in faults[0]
    assert "some.yaml" in faults[0]
    assert "\n" not in faults[0]


def test_every_fault_is_told_once(tmp_path: Path) -> None:
    faults = _faults(
        tmp_path,
        "{name: x, sweeps: [{name: a, models: [llama-toy, mamba2-toy], strategies: [{dq: 2}, {tq: 2}], repeats: 3}]}",
    )
    assert len(faults) == 2


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"nowhere\.yaml cannot be read"):
        load_study(tmp_path / "nowhere.yaml")


def test_a_batch_has_one_engine_and_one_number_of_ranks_and_every_run_is_in_one(tmp_path: Path) -> None:
    study = load_study(STUDIES / "smoke.yaml")
    grouped = batches(study, 7)
    assert sorted(run.run_id for batch in grouped for run in batch.runs) == sorted(run.run_id for run in study.runs)
    assert all(len({(run.strategy.engine, run.strategy.devices) for run in batch.runs}) == 1 for batch in grouped)
    assert max(len(batch.runs) for batch in grouped) == 7
    assert len({batch.name for batch in grouped}) == len(grouped)


def test_a_changed_cell_changes_the_digest_of_its_own_batches_alone(tmp_path: Path) -> None:
    before = {batch.name: batch.digest for batch in batches(_study(tmp_path, TINY), 1)}
    after = {batch.name: batch.digest for batch in batches(_study(tmp_path, TINY.replace("layers: 2", "layers: 3")), 1)}
    assert before.keys() == after.keys()
    assert sum(before[name] != after[name] for name in before) == 4  # mamba2-toy: two strategies, two repeats


def test_the_studies_that_come_along_hold_every_strategy_and_family_and_illegal_cells_on_purpose() -> None:
    smoke, study = (load_study(STUDIES / f"{name}.yaml") for name in ("smoke", "study"))
    assert 100 <= len(smoke.cells) <= 120
    for each in (smoke, study):
        runs = each.runs
        assert {run.model.family for run in runs} == {"transformer", "mamba2", "hybrid", "moe"}
        assert {run.workload.phase for run in runs} == {"train", "prefill", "decode"}
        assert {(run.strategy.engine, run.strategy.zero) for run in runs if run.strategy.pp == 1} >= {
            (engine, zero) for engine in ("torch", "deepspeed") for zero in range(4)
        }
        assert {run.strategy.schedule for run in runs if run.strategy.pp > 1} == set(SCHEDULES)
        assert {run.strategy.cp_kind for run in runs if run.strategy.cp > 1} == {"ring", "ulysses"}
        assert {run.strategy.recompute for run in runs} == {"none", "selective", "full"}
        assert {run.strategy.offload for run in runs} == {"none", "optimizer", "parameters"}
        assert any(run.strategy.ep > 1 for run in runs)
        assert any(run.strategy.zero_group for run in runs)
        assert any(run.strategy.engine == "deepspeed" and run.strategy.pp > 1 for run in runs)
        assert any(run.strategy.sp for run in runs)
        assert any(min(run.strategy.dp, run.strategy.tp, run.strategy.pp) > 1 for run in runs)
        assert any(infeasible_reason(run) for run in runs)
    assert {run.model.name.rsplit("-", 1)[1] for run in study.runs} == {"small", "medium", "large"}
    assert {run.strategy.devices for run in study.runs} == {1, 2, 4, 8}
    assert max(run.repeat for run in study.runs) >= 1


def test_reading_a_study_imports_no_torch() -> None:
    code = f"""
import sys
from pathlib import Path
from hybridpar.study import load_study
load_study(Path({str(STUDIES / "study.yaml")!r}))
sys.exit(bool({{"torch", "pandas", "numpy"}} & sys.modules.keys()))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
