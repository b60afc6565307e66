"""The JSON Schema (draft 2020-12) of a run spec file, as `hybridpar schema` prints it. No torch here.

The file may say `preset:` where the resolved spec holds all fields, so the schema of the file is wider
than that of RunSpec: a model needs either a preset or a family, layers and hidden.
"""

from __future__ import annotations

from typing import Any

from hybridpar.presets import CLUSTERS, MODELS
from hybridpar.specs import RunSpec


def run_spec_schema() -> dict[str, Any]:
    """Schema of SPEC.yaml: every key, its type, legal values, default and meaning."""
    schema = RunSpec.model_json_schema()
    definitions = schema["$defs"]
    for name, presets, default in (("ModelSpec", MODELS, None), ("ClusterSpec", CLUSTERS, "local")):
        definition = definitions[name]
        preset = {"enum": list(presets), "description": "named set of fields; fields beside it override it"}
        definition["properties"] = {"preset": preset, **definition["properties"]}
        required = definition.pop("required", None)
        if default is None and required:
            definition["anyOf"] = [{"required": ["preset"]}, {"required": required}]
    for definition in definitions.values():
        definition.pop("title", None)
        for field in definition["properties"].values():
            field.pop("title", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "hybridpar run spec"}
