"""The shipped jobs' data and model folder are what the specs need."""

import runpy
from pathlib import Path

import numpy as np
import pytest
import yaml
from transformers import AutoConfig, AutoTokenizer

from storage.options import S3Options
from workers.data import load_data
from workers.options import DataOptions

FOLDER = Path("jobs/quickstart")


def test_generate_reproduces_the_committed_files(tmp_path):
    runpy.run_path(str(FOLDER / "generate.py"))["generate"](tmp_path)
    names = ["chat.jsonl", *(f"model/{path.name}" for path in sorted((FOLDER / "model").iterdir()))]
    made = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert made == sorted(names)
    for name in names:
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes(), name


def test_quickstart_data_loads_with_its_own_tokenizer():
    spec = yaml.safe_load(Path("jobs/quickstart.yaml").read_text())
    tokenizer = AutoTokenizer.from_pretrained(spec["model"]["path"])
    data = load_data(DataOptions(**spec["data"]), tokenizer, S3Options())
    assert (len(data.train), len(data.held_out)) == (592, 8)
    first = data.train.tokens[: data.train.offsets[1]]
    assert tokenizer.decode(first[data.train.targets[: len(first)]]) == "8 metres are 8 x 100 = 800 centimetres.<|end|>"
    config = AutoConfig.from_pretrained(spec["model"]["path"])
    assert config.num_hidden_layers >= 8
    assert config.vocab_size == len(tokenizer) > int(np.max(data.train.tokens))
    assert (config.pad_token_id, config.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)


def test_shipped_files_are_small():
    assert (FOLDER / "chat.jsonl").stat().st_size < 200_000
    assert sum(path.stat().st_size for path in (FOLDER / "model").iterdir()) < 100_000


@pytest.mark.parametrize("job", ["quickstart", "smollm2-gsm8k"])
def test_data_section_is_valid(job):
    DataOptions(**yaml.safe_load(Path(f"jobs/{job}.yaml").read_text())["data"])
