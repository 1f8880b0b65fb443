"""Reading and tokenizing: what comes out, and one line for everything that can be wrong with it."""

import json
import pickle
import re
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer

from storage.errors import SpecError
from storage.options import S3Options
from tests.helpers.tiny import tiny_conversations, tiny_tokenizer, write_jsonl, write_tiny_chat
from workers.data import Examples, TokenizedData, load_data
from workers.options import DataOptions

TOKENIZER = tiny_tokenizer()


def load(path: Path | str, s3: S3Options | None = None, **options: Any) -> TokenizedData:
    columns = {} if "prompt_column" in options else {"messages_column": "messages"}
    return load_data(DataOptions(path=str(path), **(columns | options)), TOKENIZER, s3 or S3Options())


def texts(examples: Examples) -> list[str]:
    bounds = zip(examples.offsets[:-1], examples.offsets[1:], strict=True)
    return [TOKENIZER.decode(examples.tokens[start:end]) for start, end in bounds]


def test_prompt_and_answer_equal_the_same_messages(tmp_path):
    messages = write_jsonl(tmp_path / "m.jsonl", [{"messages": pair} for pair in tiny_conversations(5)])
    pairs = [{"q": pair[0]["content"], "a": pair[1]["content"], "n": 1} for pair in tiny_conversations(5)]
    columns = write_jsonl(tmp_path / "p.jsonl", pairs)
    loaded = load(columns, prompt_column="q", answer_column="a")
    assert loaded.fingerprint == load(messages).fingerprint
    assert texts(loaded.train)[0] == "<|start|>user\n0 + 0?<|end|>\n<|start|>assistant\n0<|end|>\n"


def test_parquet_equals_jsonl(tmp_path):
    rows = [{"messages": messages, "other": 1} for messages in tiny_conversations(5)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert load(tmp_path / "rows.parquet").fingerprint == load(write_jsonl(tmp_path / "rows.jsonl", rows)).fingerprint


def test_blank_lines_and_crlf_are_no_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [json.dumps({"messages": messages}) for messages in tiny_conversations(3)]
    path.write_bytes("\r\n\r\n".join(rows).encode())
    assert len(load(path).train) == 3


def test_without_chat_template_prompt_answer_and_end_follow_each_other(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"q": "2+2=", "a": "4"}])
    options = DataOptions(path=str(path), prompt_column="q", answer_column="a")
    train = load_data(options, tiny_tokenizer(chat_template=None), S3Options()).train
    assert texts(train) == ["2+2=4<|end|>"]
    assert train.targets.tolist() == [False] * 4 + [True] * 2


def test_without_answers_only_everything_but_the_first_token_is_learned(tmp_path):
    train = load(write_tiny_chat(tmp_path / "rows.jsonl", 2), answers_only=False).train
    assert [train.label_tokens(index) for index in range(2)] == (np.diff(train.offsets) - 1).tolist()


def test_arrays_are_compact_and_pickle_out_of_band(tmp_path):
    train = load(write_tiny_chat(tmp_path / "rows.jsonl", 3)).train
    assert (train.tokens.dtype, train.targets.dtype, train.offsets.dtype) == (np.int32, np.bool_, np.int64)
    buffers: list[pickle.PickleBuffer] = []
    pickle.dumps(train, protocol=5, buffer_callback=buffers.append)
    assert sorted(buffer.raw().nbytes for buffer in buffers) == sorted(
        array.nbytes for array in (train.tokens, train.targets, train.offsets)
    )


def test_held_out_are_the_last_rows(tmp_path):
    path = write_tiny_chat(tmp_path / "rows.jsonl", 10)
    everything, split = load(path), load(path, eval_examples=3)
    assert len(everything.held_out) == 0
    assert texts(split.train) + texts(split.held_out) == texts(everything.train)
    assert len(split.held_out) == 3
    assert split.fingerprint != everything.fingerprint


def test_eval_path_gives_its_first_rows_or_all(tmp_path):
    path, other = write_tiny_chat(tmp_path / "a.jsonl", 4), write_tiny_chat(tmp_path / "b.jsonl", 6)
    assert len(load(path, eval_path=str(other)).held_out) == 6
    some = load(path, eval_path=str(other), eval_examples=2)
    assert (len(some.train), texts(some.held_out)) == (4, texts(load(other).train)[:2])


def test_fingerprint_follows_the_content(tmp_path):
    rows = [{"messages": messages} for messages in tiny_conversations(4)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    first = load(path)
    assert load(path).fingerprint == first.fingerprint
    assert re.fullmatch(r"[0-9a-f]{32}", first.fingerprint)
    assert load(write_jsonl(path, rows[::-1])).fingerprint != first.fingerprint
    assert load(path, answers_only=False).fingerprint != first.fingerprint


def test_too_long(tmp_path, caplog):
    pairs = [{"q": "x", "a": "y" * length} for length in (1, 30, 2)]
    path = write_jsonl(tmp_path / "rows.jsonl", pairs)
    columns = {"prompt_column": "q", "answer_column": "a", "max_length": 30}
    with pytest.raises(SpecError, match=r"line 2: 52 tokens, data\.max_length is 30; .*truncate or drop"):
        load(path, **columns)
    assert np.diff(load(path, too_long="drop", **columns).train.offsets).tolist() == [23, 24]
    truncated = load(path, too_long="truncate", **columns).train
    assert np.diff(truncated.offsets).tolist() == [23, 30, 24]
    assert [truncated.label_tokens(index) for index in range(3)] == [2, 10, 3]
    assert "1 of 3 examples longer than 30 tokens: truncated" in caplog.text


ROW = {"messages": tiny_conversations(1)[0]}
PAIR = {"prompt_column": "q", "answer_column": "a"}


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.jsonl", None, {}, r"data\.path: no file at .*a\.jsonl; check it"),
        ("a.csv", "x", {}, r"data\.path: expected a file ending in \.jsonl or \.parquet, got '.*a\.csv'"),
        ("a.jsonl", "", {}, r"data\.path: .*a\.jsonl has no rows, expected at least one"),
        ("a.jsonl", "\n \n", {}, r"has no rows"),
        (
            "a.jsonl",
            json.dumps(ROW) + "\n{'a'",
            {},
            r"a\.jsonl line 2: expected one JSON object per line, got Expecting",
        ),
        ("a.jsonl", b"\xff\xfe{}", {}, r"line 1: expected one JSON object per line, got not UTF-8"),
        ("a.jsonl", "[1]", {}, r"line 1: expected a JSON object, got list"),
        (
            "a.jsonl",
            [{"text": "x", "id": 1}],
            {},
            r"line 1: no column 'messages'; columns there are: text, id; set data",
        ),
        ("a.parquet", [{"text": "x", "id": 1}], {}, r"a\.parquet: no column 'messages'; columns there are: text, id"),
        ("a.parquet", "no parquet", {}, r"a\.parquet: expected a Parquet file, got: "),
        ("a.jsonl", [ROW, {"messages": "hi"}], {}, r"line 2: messages: expected a list of .*, got a string"),
        ("a.jsonl", [ROW, {"messages": []}], {}, r"line 2: messages: expected a list of .*, got an empty list"),
        ("a.jsonl", [{"messages": ["hi"]}], {}, r"line 1: messages\[0\]: expected \{role, content\}, got a string"),
        ("a.jsonl", [{"messages": [{"content": "x"}]}], {}, r"messages\[0\]\.role: expected a string, got null"),
        (
            "a.jsonl",
            [{"messages": [{"role": "user", "content": 3}]}],
            {},
            r"\[0\]\.content: expected a string, got a number",
        ),
        ("a.jsonl", [{"messages": [{"role": "user", "content": "x"}]}], {}, r"expected a message with role assistant"),
        ("a.jsonl", [{"q": "x", "a": 4}], PAIR, r"line 1: a: expected a string, got a nu"),
        ("a.parquet", [{"q": "x", "a": None}], PAIR, r"row 1: a: expected .* got null"),
        ("a.jsonl", [ROW] * 4, {"eval_examples": 4}, r"data\.eval_examples: expected fewer than the 4 rows .*, got 4"),
        ("a.jsonl", [ROW], {"eval_path": "nowhere.jsonl"}, r"data\.eval_path: no file at nowhere\.jsonl"),
        (
            "a.jsonl",
            [ROW],
            {"max_length": 9, "too_long": "truncate"},
            r"line 1: expected a token of the answer .* first 9 of 28 tokens",
        ),
        ("a.jsonl", [ROW], {"max_length": 9, "too_long": "drop"}, r"data\.max_length: all 1 rows .* than 9 tokens"),
    ],
)
def test_bad_input_is_one_line(tmp_path, name, content, options, message):
    path = tmp_path / name
    match content:
        case str() | bytes():
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        case list() if name.endswith("parquet"):
            pq.write_table(pa.Table.from_pylist(content), path)
        case list():
            write_jsonl(path, content)
    with pytest.raises(SpecError, match=message) as caught:
        load(path, **options)
    assert "\n" not in str(caught.value)


def test_errors_never_show_whole_payloads(tmp_path):
    path = tmp_path / "rows.jsonl"
    secret = "secret " * 1000
    for line in (f'{{"text": "{secret}"}}', f'{{"messages": "{secret}"}}', f'{{"messages": {secret}}}'):
        path.write_text(line)
        with pytest.raises(SpecError) as caught:
            load(path)
        assert "secret" not in str(caught.value)


def test_folder_and_other_schemes_are_refused(tmp_path):
    (tmp_path / "d.jsonl").mkdir()
    with pytest.raises(SpecError, match="is a folder"):
        load(tmp_path / "d.jsonl")
    with pytest.raises(SpecError, match="expected a local path or an s3:// URL, got https://"):
        load("https://example.org/a.jsonl")


def test_messages_need_a_chat_template(tmp_path):
    options = DataOptions(path=str(write_tiny_chat(tmp_path / "rows.jsonl")), messages_column="messages")
    with pytest.raises(SpecError, match=r"no chat template, expected one .* set data\.chat_template"):
        load_data(options, tiny_tokenizer(chat_template=None), S3Options())


@pytest.fixture(scope="module")
def s3():
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield S3Options(endpoint=f"http://{host}:{port}", region="us-east-1", access_key="key", secret_key="secret")
    server.stop()


def test_reads_from_s3(tmp_path, s3):
    path = write_tiny_chat(tmp_path / "rows.jsonl", 5)
    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}
    client = boto3.client("s3", endpoint_url=s3.endpoint, region_name="us-east-1", **keys)
    client.create_bucket(Bucket="bucket")
    client.upload_file(str(path), "bucket", "some/rows.jsonl")
    assert load("s3://bucket/some/rows.jsonl", s3).fingerprint == load(path).fingerprint
    for missing in ("s3://bucket/some/other.jsonl", "s3://nowhere/rows.jsonl"):
        with pytest.raises(SpecError, match=f"data.path: no file at {missing}"):
            load(missing, s3)


def test_unreachable_s3_is_one_line():
    s3 = S3Options(endpoint="http://127.0.0.1:9", region="us-east-1", access_key="key", secret_key="secret")
    with pytest.raises(SpecError, match=r"data\.path: cannot read s3://bucket/a\.jsonl: .*; check address") as caught:
        load("s3://bucket/a.jsonl", s3)
    assert "\n" not in str(caught.value)
