"""A spec that is fine, for tests to break in one place."""

from pathlib import Path

from app.job_spec import JobSpec, load_spec

GOOD = """\
name: quick
model: {path: models/tiny}
data: {path: data/train.jsonl, messages_column: messages}
training:
  steps: 60
  learning_rate: 2e-5
"""


def write_spec(folder: Path, text: str = GOOD) -> Path:
    path = folder / "job.yaml"
    path.write_text(text)
    return path


def good_spec(folder: Path, *overrides: str) -> JobSpec:
    return load_spec(write_spec(folder), overrides)
