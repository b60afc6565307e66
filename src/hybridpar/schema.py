"""The JSON Schema (draft 2020-12) of a run spec file, as `hybridpar schema` prints it. No torch here.

The file may say `preset:` where the resolved spec holds all fields, so the schema of the file is wider
than that of RunSpec: a model needs either a preset or a family, layers and hidden.
"""

from __future__ import annotations

import json
from typing import Any

from hybridpar.legality import AVAILABLE
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


def field_lines() -> list[str]:
    """The same for a reader: a line per field with its legal values, default and meaning."""
    schema = run_spec_schema()
    lines = []
    for section, reference in schema["properties"].items():
        definition = reference.get("$ref", "").rpartition("/")[2]
        if not definition:
            lines.append(_field_line(section, section, reference))
            continue
        fields = schema["$defs"][definition]["properties"]
        lines.append(f"{section}:")
        lines += [f"  {_field_line(f'{section}.{name}', name, field)}" for name, field in fields.items()]
    return lines


def _field_line(path: str, name: str, field: dict[str, Any]) -> str:
    legal = "|".join(str(value) for value in field["enum"]) if "enum" in field else field.get("type", "")
    available = f" This version: {'|'.join(map(str, AVAILABLE[path]))}." if path in AVAILABLE else ""
    return f"{name} ({legal}{_default(path, field)}): {field.get('description', '')}.{available}"


def _default(path: str, field: dict[str, Any]) -> str:
    if "default" not in field:
        return ""
    if path.startswith("model.") and field["default"] in (0, "") and field["default"] is not False:
        return ", default: what the family usually has"
    return f", default {json.dumps(field['default'])}"
