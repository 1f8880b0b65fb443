"""A job that would write into Ray's temporary copy of its working directory is warned."""

from pathlib import Path

import pytest

from app.preflight import fleeting_paths
from app.spec_identity import resolve_paths
from tests.unit.app.specs import good_spec

COPY = "ray/session_2026/runtime_resources/working_dir_files/_ray_pkg_0123456789abcdef"


@pytest.mark.parametrize(
    ("overrides", "fields"),
    [
        ([], ["storage.url"]),
        (["storage.url=/mnt/runs", "export=model"], ["export"]),
        (["storage.url=runs", "export=model"], ["storage.url", "export"]),
        (["storage.url=/mnt/runs", "export=/mnt/model"], []),
        (["storage.url=s3://bucket/runs"], []),
    ],
)
def test_relative_paths_of_a_submitted_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], fields: list[str]
) -> None:
    (tmp_path / COPY).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / COPY)
    warnings = fleeting_paths(resolve_paths(good_spec(tmp_path, *overrides)))
    assert [warning.partition(":")[0] for warning in warnings] == fields
    assert all(COPY in warning and "give an absolute path or an s3:// URL" in warning for warning in warnings)


def test_relative_paths_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert fleeting_paths(resolve_paths(good_spec(tmp_path))) == []
