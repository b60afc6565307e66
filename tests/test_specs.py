"""A spec says everything about a run, refuses what it does not understand, and names the run by its content."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpar.legality import violations
from hybridpar.presets import MODELS
from hybridpar.specs import ModelSpec, RunSpec, SpecError, load_run_spec, parse_run_spec

EXAMPLE = """
model: {preset: llama-toy}
workload: {phase: train, seq_len: 64, global_batch: 16, micro_batch: 2, steps: 4, precision: fp64,
           optimizer: adamw, grad_clip: 1.0}
strategy: {engine: torch, dp: 2, tp: 2, pp: 1, cp: 1, ep: 1, zero: 1, sp: true, cp_kind: ring,
           schedule: 1f1b, virtual: 1, recompute: none, offload: none, overlap: true}
cluster: {preset: local}
seed: 0
"""


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    return path


def test_the_example_of_the_documentation_is_a_legal_run(tmp_path: Path) -> None:
    run = load_run_spec(_write(tmp_path, EXAMPLE))
    assert violations(run) == ()
    assert run.strategy.devices == 4
    assert run.micro_batches == 4
    assert run.tokens_per_step == 16 * 64
    assert run.strategy.label == "dp2-tp2-zero1-sp"


def test_the_saved_spec_is_the_same_run(tmp_path: Path) -> None:
    run = load_run_spec(_write(tmp_path, EXAMPLE))
    again = parse_run_spec(json.loads(run.model_dump_json()))
    assert again == run
    assert again.run_id == run.run_id


@pytest.mark.parametrize("name", MODELS)
def test_every_preset_resolves_and_has_a_kind_for_each_layer(name: str) -> None:
    model = ModelSpec.model_validate({"preset": name})
    assert model.name == name
    assert len(model.layer_kinds) == model.layers


def test_run_id_depends_on_content_alone(tmp_path: Path) -> None:
    run = load_run_spec(_write(tmp_path, EXAMPLE))
    reordered = load_run_spec(_write(tmp_path, "seed: 0\n" + EXAMPLE.replace("seed: 0\n", "")))
    assert reordered.run_id == run.run_id
    changed = [load_run_spec(_write(tmp_path, EXAMPLE), [text]) for text in ("seed=1", "repeat=1", "strategy.sp=false")]
    assert len({run.run_id, *(other.run_id for other in changed)}) == 4


def test_what_a_family_needs_and_the_spec_leaves_out_gets_a_sensible_value() -> None:
    model = parse_run_spec({"model": {"family": "hybrid", "layers": 4, "hidden": 128}}).model
    assert (model.layer_kinds, model.heads, model.kv_heads, model.head_dim) == ("MAMA", 2, 2, 64)
    assert (model.ssm_inner, model.ssm_heads) == (256, 4)


def test_fields_beside_a_preset_override_it() -> None:
    assert parse_run_spec({"model": {"preset": "llama-toy", "layers": 2}}).model.layers == 2


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({}, "model is missing"),
        ([1], "a run spec is a mapping with the keys model, workload, strategy, cluster, seed, repeat, not [1]"),
        ({"model": {"preset": "lama-toy"}}, "model.preset='lama-toy' is unknown (did you mean llama-toy?)"),
        ({"model": {"preset": "llama-toy", "heds": 3}}, "model.heds is not a known key (did you mean heads?)"),
        ({"model": {"preset": "llama-toy", "heads": 5}}, "model.kv_heads=2 does not divide model.heads=5; legal: 1, 5"),
        ({"model": {"preset": "llama-toy", "pattern": "AX"}}, "model.pattern='AX' may hold only the letters A, E, M"),
        ({"model": {"family": "mamba2", "layers": 2}}, "model.hidden is missing"),
        ({"model": {"family": "mamba2", "layers": 2, "hidden": 24, "ssm_head_dim": 5}}, "model.ssm_head_dim=5"),
        ({"model": 4}, "model=4 must be a mapping"),
        ({"model": {"preset": "llama-toy"}, "strategy": {"zero": 7}}, "strategy.zero=7 is not legal; legal: 0, 1, 2"),
        ({"model": {"preset": "llama-toy"}, "strategy": {"dp": 0}}, "strategy.dp=0 is not legal; it must be greater"),
        ({"model": {"preset": "llama-toy"}, "strategy": {"dp": 2.5}}, "strategy.dp=2.5 is not legal"),
        ({"model": {"preset": "llama-toy"}, "strategy": {"sp": "yes"}}, "strategy.sp='yes' is not legal"),
        ({"model": {"preset": "llama-toy"}, "workload": {"steps": 1}}, "workload.warmup_steps=1 leaves no step"),
        ({"model": {"preset": "llama-toy"}, "workload": {"learning_rate": float("nan")}}, "workload.learning_rate=nan"),
        ({"model": {"preset": "llama-toy"}, "seed": -1}, "seed=-1 is not legal"),
    ],
)
def test_a_malformed_spec_is_refused_in_one_sentence_per_fault(content: object, sentence: str) -> None:
    with pytest.raises(SpecError) as refusal:
        parse_run_spec(content)
    assert len(refusal.value.faults) == 1
    assert sentence in refusal.value.faults[0]


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(SpecError) as refusal:
        parse_run_spec({"model": {"preset": "llama-toy"}, "strategy": {"dp": "x", "zero": 9}, "sed": 1})
    assert len(refusal.value.faults) == 3


@pytest.mark.parametrize("override", ["strategy.dp", "=3", "strategy.dp.x=1", "strategy.dp=[", "strategy.dq=2"])
def test_a_bad_override_is_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(SpecError):
        load_run_spec(_write(tmp_path, EXAMPLE), [override])


@pytest.mark.parametrize("text", ["model: {preset: [", "\x00", "- 1", "", "model: &a {preset: *a}"])
def test_an_unreadable_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SpecError):
        load_run_spec(_write(tmp_path, text))


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_a_file_that_cannot_be_opened_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(SpecError, match="cannot be read"):
        load_run_spec(tmp_path / name)


_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.floats()
    | st.sampled_from(["1f1b", "torch", "ring", "moe", "fp8", "llama-toy", "mamba2-toy", "x", "1e-3", ""])
)


def _section(name: str) -> st.SearchStrategy[object]:
    fields = [*RunSpec.model_fields[name].annotation.model_fields, "preset"]  # type: ignore[union-attr]
    return st.dictionaries(st.sampled_from(fields), _SCALARS, max_size=6) | _SCALARS


@settings(max_examples=500, deadline=None)
@given(st.fixed_dictionaries({}, optional={n: _section(n) for n in ("model", "workload", "strategy", "cluster")}))
def test_random_content_is_a_run_or_a_spec_error_and_never_anything_else(content: dict[str, object]) -> None:
    sentences = _sentences(content)
    assert all(sentence and "\n" not in sentence for sentence in sentences)


def _sentences(content: object) -> tuple[str, ...]:
    try:
        return tuple(str(violation) for violation in violations(parse_run_spec(content)))
    except SpecError as error:
        return error.faults


def test_the_planning_modules_do_not_import_torch() -> None:
    modules = ", ".join(f"hybridpar.{name}" for name in ("specs", "legality", "schema", "mesh", "study"))
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "False\n"
