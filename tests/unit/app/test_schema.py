"""The printed schema covers the whole spec."""

import pytest
from pydantic import BaseModel

from app.job_spec import JobSpec
from app.schema import fields_of, render_schema

SPEC_FIELDS = fields_of(JobSpec)


def _leaf_paths(value: object, path: str = "") -> set[str]:
    if isinstance(value, BaseModel):
        value = dict(value)
    if isinstance(value, dict) and value:
        return {leaf for key, inner in value.items() for leaf in _leaf_paths(inner, f"{path}.{key}".lstrip("."))}
    if isinstance(value, list) and value:
        return _leaf_paths(value[0], f"{path}[]")
    return {path}


def test_every_field_is_listed_once_with_type_and_meaning() -> None:
    spec = JobSpec.model_validate(
        {
            "name": "x",
            "model": {"path": "m"},
            "data": {"path": "d.jsonl", "messages_column": "m"},
            "training": {"steps": 5},
            "fault_injection": [{"rank": 0, "step": 1}],
        }
    )
    paths = [field.path for field in SPEC_FIELDS]
    assert len(paths) == len(set(paths))
    leaves = _leaf_paths(spec)
    assert leaves <= set(paths)
    assert {field.path for field in SPEC_FIELDS if "section" not in field.type} == {
        leaf for leaf in leaves if leaf in paths
    }
    for field in SPEC_FIELDS:
        assert field.meaning.endswith("."), field.path
        assert field.type, field.path


@pytest.mark.parametrize(
    ("path", "type_", "required", "default"),
    [
        ("name", "text", True, None),
        ("training.steps", "integer >= 1 or null", False, None),
        ("training.betas", "[number >= 0 and < 1, number >= 0 and < 1]", False, [0.9, 0.999]),
        ("checkpoint.write_budget", "number or text", False, "1/20"),
        ("checkpoint.mode", "one of adaptive, full", False, "adaptive"),
        ("model.layers", "mapping of names to list of text or null", False, None),
        ("storage.s3.secret_key", "text or null", False, None),
        ("fault_injection", "list of sections", False, []),
        ("fault_injection[].step", "integer >= 0", True, None),
        ("failures.attempts_without_progress", "integer >= 1", False, 5),
    ],
)
def test_facts_of_a_field(path: str, type_: str, required: bool, default: object) -> None:
    (field,) = [field for field in SPEC_FIELDS if field.path == path]
    assert (field.type, field.required, field.default) == (type_, required, default)


@pytest.mark.parametrize("columns", [80, 200])
def test_lines_fit_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = render_schema(SPEC_FIELDS)
    assert 60 < max(map(len, text.splitlines())) <= min(columns, 100)
    assert 'checkpoint.write_budget: number or text; default "1/20"\n    Share of the full state' in text
