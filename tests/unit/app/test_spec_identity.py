"""Which specs are the same job, and what the catalog may see of one."""

import json
from pathlib import Path

import pytest

from app.spec_identity import differing_fields, fingerprint, public_dump, resolve_paths
from tests.unit.app.specs import good_spec


def _stored(dump: dict[str, object]) -> dict[str, object]:
    """As it comes back from the catalog."""
    return json.loads(json.dumps(dump))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "override",
    [
        "storage.url=elsewhere",
        "scaling.workers=4",
        "failures.attempts_without_progress=9",
        "fault_injection=[{rank: 0, step: 1}]",
        "training.learning_rate=0.00002",
        "data.path=./data/../data/train.jsonl",
    ],
)
def test_what_does_not_define_the_result_may_change(tmp_path: Path, override: str) -> None:
    old, new = good_spec(tmp_path), good_spec(tmp_path, override)
    assert differing_fields(_stored(public_dump(old)), public_dump(new)) == []
    assert fingerprint(public_dump(old)) == fingerprint(public_dump(new))


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("name=other", 'name: expected "quick", got "other"'),
        ("training.learning_rate=1e-4", "training.learning_rate: expected 2e-05, got 0.0001"),
        ("training.betas=[0.8, 0.9]", "training.betas: expected [0.9, 0.999], got [0.8, 0.9]"),
        ("model.revision=main", 'model.revision: expected null, got "main"'),
        (
            "model.layers={a: [x]}",
            'model.layers: expected null, got nothing\nmodel.layers.a: expected nothing, got ["x"]',
        ),
        ("checkpoint.mode=full", 'checkpoint.mode: expected "adaptive", got "full"'),
        ("data.path=/other/train.jsonl", 'data.path: expected "data/train.jsonl", got "/other/train.jsonl"'),
        ("data.path=s3://b/x.jsonl", 'data.path: expected "data/train.jsonl", got "s3://b/x.jsonl"'),
        (f"data.chat_template={'x' * 99}", f'data.chat_template: expected null, got "{"x" * 59}...'),
    ],
)
def test_what_defines_the_result_is_named(tmp_path: Path, override: str, difference: str) -> None:
    old, new = good_spec(tmp_path), good_spec(tmp_path, override)
    assert differing_fields(_stored(public_dump(old)), public_dump(new)) == difference.splitlines()
    assert fingerprint(public_dump(old)) != fingerprint(public_dump(new))


def test_another_checkout_and_absolute_paths_are_the_same_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dumps = []
    for checkout in (tmp_path / "a", tmp_path / "b" / "c"):
        (checkout / "models" / "tiny").mkdir(parents=True)
        monkeypatch.chdir(checkout)
        spec = good_spec(checkout)
        resolved = resolve_paths(spec)
        absolute = good_spec(checkout, f"data.path={checkout}/data/train.jsonl")
        dumps += [
            public_dump(spec),
            public_dump(resolved) | {"storage": public_dump(spec)["storage"]},
            public_dump(absolute),
        ]
    assert all(dump == dumps[0] for dump in dumps)


def test_local_paths_become_absolute_and_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    local = resolve_paths(good_spec(tmp_path, "data.eval_path=eval.jsonl"))
    assert (local.model.path, local.data.path) == (f"{tmp_path}/models/tiny", f"{tmp_path}/data/train.jsonl")
    assert (local.data.eval_path, local.storage.url) == (f"{tmp_path}/eval.jsonl", f"{tmp_path}/runs")
    remote = good_spec(tmp_path, "model.path=org/model", "data.path=s3://b/d.jsonl", "storage.url=s3://b/runs")
    assert resolve_paths(remote) == remote


def test_the_catalog_sees_no_secret_and_the_workers_do(tmp_path: Path) -> None:
    spec = good_spec(tmp_path, "storage.s3={access_key: AKIA, secret_key: hunter2}")
    text = json.dumps(public_dump(spec))
    assert "hunter2" not in text
    assert "AKIA" not in text
    key = resolve_paths(spec).storage.s3.secret_key
    assert key is not None
    assert key.get_secret_value() == "hunter2"
    assert "hunter2" not in repr(spec)
