"""Rows of a JSONL or Parquet file, local or on S3; every error names the field, the file and the row."""

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from storage.errors import SpecError
from storage.options import S3Options

MAX_COLUMNS_SHOWN = 20
READ_BYTES = 8 * 2**20


class Row(NamedTuple):
    """One row: `where` names it for error messages, `values` holds the columns asked for."""

    where: str
    values: dict[str, Any]


def read_rows(field: str, path: str, columns: Sequence[str], s3: S3Options) -> list[Row]:
    """Read `columns` of every row of the file at `path`.

    Args:
        field: name of the spec field that holds `path`, for error messages.
        path: local path or `s3://bucket/key`, ending in `.jsonl` or `.parquet`.
        columns: columns that every row must have.
        s3: connection, if `path` is on S3.

    Raises:
        SpecError: the file is missing, unreadable, empty, malformed, or lacks a column.
    """
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    reader = readers.get(Path(path).suffix.lower())
    if reader is None:
        raise SpecError(f"{field}: expected a file ending in {' or '.join(readers)}, got {path!r}; convert the file")
    try:
        file_system, location = _locate(field, path, s3)
        if file_system.get_file_info(location).type == pafs.FileType.Directory:
            raise SpecError(f"{field}: {path} is a folder, expected one .jsonl or .parquet file; name the file")
        with file_system.open_input_file(location) as file:
            rows = list(reader(f"{field}: {path}", file, columns))
    except FileNotFoundError as error:
        raise SpecError(
            f"{field}: no file at {path}; check it (a relative path starts at the current folder)"
        ) from error
    except OSError as error:
        reason = " ".join(str(error).split())[:300]
        raise SpecError(f"{field}: cannot read {path}: {reason}; check address, credentials and permissions") from error
    if not rows:
        raise SpecError(f"{field}: {path} has no rows, expected at least one; name another file")
    return rows


def _locate(field: str, path: str, s3: S3Options) -> tuple[pafs.FileSystem, str]:
    """File system that holds `path`, and the path inside it."""
    parts = urlsplit(path)
    if "://" not in path:
        return pafs.LocalFileSystem(), str(Path(path).expanduser().absolute())
    if parts.scheme != "s3":
        raise SpecError(
            f"{field}: expected a local path or an s3:// URL, got {parts.scheme}://...; copy the file to one of them"
        )
    endpoint = urlsplit(s3.endpoint or "")
    options = {
        "endpoint_override": endpoint.netloc,
        "scheme": endpoint.scheme,
        "region": s3.region,
        "access_key": s3.access_key and s3.access_key.get_secret_value(),
        "secret_key": s3.secret_key and s3.secret_key.get_secret_value(),
    }
    # A wrong endpoint must not hang the start: S3FileSystem alone would retry for minutes.
    file_system = pafs.S3FileSystem(
        connect_timeout=5,
        request_timeout=60,
        retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=3),
        **{name: value for name, value in options.items() if value},
    )
    return file_system, path.removeprefix("s3://")


def _read_jsonl(source: str, file: pa.NativeFile, columns: Sequence[str]) -> Iterator[Row]:
    for number, line in enumerate(io.BufferedReader(file, READ_BYTES), start=1):
        if not line.strip():
            continue
        where = f"{source} line {number}"
        try:
            values = json.loads(line.decode("utf-8-sig"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else "not UTF-8"
            raise SpecError(f"{where}: expected one JSON object per line, got {reason}; mend the line") from error
        if not isinstance(values, dict):
            raise SpecError(f"{where}: expected a JSON object, got {type(values).__name__}; mend the line")
        _require_columns(where, list(values), columns)
        yield Row(where, {column: values[column] for column in columns})


def _read_parquet(source: str, file: pa.NativeFile, columns: Sequence[str]) -> Iterator[Row]:
    try:
        parquet = pq.ParquetFile(file)
        _require_columns(source, parquet.schema_arrow.names, columns)
        batches = parquet.iter_batches(columns=list(columns))
        for number, values in enumerate((row for batch in batches for row in batch.to_pylist()), start=1):
            yield Row(f"{source} row {number}", values)
    except pa.ArrowInvalid as error:
        reason = str(error).splitlines()[0][:200]
        raise SpecError(f"{source}: expected a Parquet file, got: {reason}; write it again") from error


def _require_columns(where: str, found: Sequence[str], columns: Sequence[str]) -> None:
    missing = [column for column in columns if column not in found]
    if missing:
        shown = ", ".join(found[:MAX_COLUMNS_SHOWN]) or "none"
        raise SpecError(
            f"{where}: no column {missing[0]!r}; columns there are: {shown}; set data.*_column to one of them"
        )
