"""The job spec's fields: path, type, default and meaning, taken from the pydantic model."""

import json
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from storage.options import Options

_TYPE_WORDS = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false", "null": "null"}
_LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


class FieldFacts(NamedTuple):
    """What a user needs to know of one field. `default` as it stands in JSON; None, too, if there is none."""

    path: str
    type: str
    required: bool
    default: Any
    meaning: str


def fields_of(spec: type[Options]) -> list[FieldFacts]:
    """Facts of every section and field of `spec`, sections before their fields; `[]` stands for a list's index."""
    schema = spec.model_json_schema()
    return list(_fields(schema, schema.get("$defs", {}), ""))


def _fields(section: dict[str, Any], definitions: dict[str, Any], prefix: str) -> Iterator[FieldFacts]:
    required = section.get("required", [])
    for name, field in section["properties"].items():
        path = f"{prefix}{name}"
        inner_path, inner = _section_in(path, field, definitions)
        meaning = field.get("description") or (inner or {}).get("description", "")
        yield FieldFacts(
            path=path,
            type=_type_of(field, definitions),
            required=name in required,
            default=field.get("default"),
            meaning=" ".join(meaning.split()),
        )
        if inner is not None:
            yield from _fields(inner, definitions, f"{inner_path}.")


def _section_in(path: str, field: dict[str, Any], definitions: dict[str, Any]) -> tuple[str, dict[str, Any] | None]:
    if field.get("type") == "array" and "$ref" in field.get("items", {}):
        path, field = f"{path}[]", field["items"]
    reference = field.get("$ref")
    return path, definitions[reference.rpartition("/")[2]] if reference else None


def _type_of(field: dict[str, Any], definitions: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_type_of(option, definitions) for option in field["anyOf"])
    if "$ref" in field:
        return "section"
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return "one of " + ", ".join(map(str, field["enum"]))
    if field["type"] == "array":
        if "prefixItems" in field:
            return "[" + ", ".join(_type_of(item, definitions) for item in field["prefixItems"]) + "]"
        return f"list of {_plural(_type_of(field['items'], definitions))}"
    if field["type"] == "object":
        return f"mapping of names to {_type_of(field['additionalProperties'], definitions)}"
    limits = [f"{sign} {field[key]}" for key, sign in _LIMITS.items() if key in field]
    return " ".join([_TYPE_WORDS[field["type"]], " and ".join(limits)]).strip()


def _plural(word: str) -> str:
    return "sections" if word == "section" else word


def render_schema(fields: Iterable[FieldFacts]) -> str:
    """Lay out for reading, as wide as the terminal (80 columns in a pipe, 100 at most)."""
    width = min(shutil.get_terminal_size().columns, 100)
    lines = []
    for field in fields:
        if "section" in field.type:
            lines.append("")
        default = (
            "required" if field.required else "" if field.type == "section" else f"default {json.dumps(field.default)}"
        )
        lines.extend(
            textwrap.wrap(f"{field.path}: {field.type}; {default}".rstrip("; "), width, subsequent_indent="    ")
        )
        lines.extend(textwrap.wrap(field.meaning, width, initial_indent="    ", subsequent_indent="    "))
    return "\n".join(lines).strip() + "\n"
