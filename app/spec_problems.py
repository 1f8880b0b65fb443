"""One line for each problem that validation finds in a job spec: field, expected, got, what to do."""

import difflib
import json
import re
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from app.schema import FieldFacts, fields_of
from storage.options import Options

_SHOWN_CHARACTERS = 60


def problems_of(error: ValidationError, data: Any, spec: type[Options]) -> list[str]:
    """Explain `error`, which validating `data` as `spec` raised. No line holds a value that may be secret."""
    facts = {field.path: field for field in fields_of(spec)}
    lines: list[str] = []
    for detail in error.errors(include_url=False):
        lines += (line for line in _lines(detail, data, spec, facts) if line not in lines)
    return lines


def unknown_key(path: str, key: str, known: list[str]) -> str:
    """Say that there is no `key` at `path` (which ends in it), what there is, and what may have been meant."""
    meant = difflib.get_close_matches(key, known, n=1)
    hint = f"; did you mean {meant[0]}?" if meant else "; remove or rename it"
    return f"{path}: unknown key; expected one of {', '.join(known)}{hint}"


def _lines(detail: ErrorDetails, data: Any, spec: type[Options], facts: dict[str, FieldFacts]) -> list[str]:
    location = _location(detail, data)
    path = ".".join(map(str, location))
    field = facts.get(path_in_schema(location))
    match detail["type"]:
        case "extra_forbidden":
            return [unknown_key(path, str(location[-1]), list(options_at(spec, location[:-1]).model_fields))]
        case "missing":
            return [f"{path}: missing; expected {field.type} ({field.meaning})" if field else f"{path}: missing"]
        case "value_error":
            message = detail["msg"].removeprefix("Value error, ")
            return [f"{path}: {message}"] if path else message.splitlines()
        case "finite_number":
            expected = "a finite number"
        case _ if field:
            expected = "a mapping of keys to values" if field.type == "section" else field.type
        case _:
            expected = detail["msg"].removeprefix("Input should be ")
    return [f"{path}: expected {expected}, got {_shown(path, detail['input'])}{_hint(expected, detail['input'])}"]


def _location(detail: ErrorDetails, data: Any) -> tuple[str | int, ...]:
    """Where in `data` it is: pydantic's own, without the names of union members it appends."""
    location: list[str | int] = []
    for part in detail["loc"]:
        keys = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
        if part in keys:
            data = data[part]
        elif detail["type"] != "missing":
            break
        location.append(part)
    return tuple(location)


def path_in_schema(location: tuple[str | int, ...]) -> str:
    """Path of a field as `fields_of` writes it: `("faults", 0, "rank")` is `faults[].rank`."""
    return "".join("[]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


def options_at(spec: type[Options], location: tuple[str | int, ...]) -> type[Options]:
    """Section of `spec` that stands at `location`."""
    for part in location:
        if isinstance(part, str):
            annotation = spec.model_fields[part].annotation
            candidates = [annotation, *get_args(annotation)]
            spec = next(item for item in candidates if isinstance(item, type) and issubclass(item, Options))
    return spec


def _shown(path: str, value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if path == "storage" or path.startswith("storage.s3"):
        return "something else (not shown, it may be secret)"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _hint(expected: str, value: Any) -> str:
    if isinstance(value, str) and expected.startswith("one of "):
        meant = difflib.get_close_matches(value, re.findall(r"\w+", expected.removeprefix("one of ")), n=1)
        return f"; did you mean {meant[0]}?" if meant else ""
    if isinstance(value, str) and expected.startswith(("integer", "number", "true or false")):
        return "; write it without quotes" if re.fullmatch(r"[-+.\deE]*\d|true|false", value) else ""
    if isinstance(value, bool | int | float) and expected.startswith("text"):
        return "; put it in quotes"
    return ""
