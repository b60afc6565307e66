"""The printed schema accepts what the parser accepts and refuses unknown keys."""

import jsonschema
import pytest
import yaml

from hybridpar.schema import run_spec_schema
from hybridpar.specs import RunSpec
from tests.test_specs import EXAMPLE


def test_the_schema_is_valid_and_accepts_the_documented_example() -> None:
    jsonschema.Draft202012Validator.check_schema(run_spec_schema())
    jsonschema.validate(yaml.safe_load(EXAMPLE), run_spec_schema())


@pytest.mark.parametrize(
    "content",
    [{"model": {"preset": "nope"}}, {"model": {"layers": 2}}, {"model": {"preset": "llama-toy"}, "x": 1}, {}],
)
def test_the_schema_refuses_what_the_parser_refuses(content: dict) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content, run_spec_schema())


def test_every_field_has_a_description() -> None:
    schema = run_spec_schema()
    missing = [
        f"{section}.{name}"
        for section, definition in schema["$defs"].items()
        for name, field in definition["properties"].items()
        if not field.get("description") and section in {"ModelSpec", "WorkloadSpec", "Strategy", "ClusterSpec"}
    ]
    assert missing == []
    assert set(schema["properties"]) == set(RunSpec.model_fields)
