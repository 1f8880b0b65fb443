"""What pyarrow does not tell of an Arrow IPC file: where its record batches lie, and whether they are compressed.

A compressed buffer says itself how large it becomes, and Arrow believes it: a file of a kilobyte would take the memory
of the machine. Two blocks of a footer may also be the same bytes of the file, again and again. Layouts: `File.fbs` and
`Message.fbs` in the `format` folder of Apache Arrow; fields are found as https://flatbuffers.dev/internals describes.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pyarrow as pa

from storage.errors import CorruptObjectError

_MAGIC = b"ARROW1"
_TAIL = struct.Struct(f"<i{len(_MAGIC)}s")
_BLOCK = struct.Struct("<qi4xq")

# What Arrow raises for bytes that are no IPC file: its own errors, and Python's for sizes and names that make no sense.
_PARSE_ERRORS = (
    pa.ArrowException,
    OSError,
    EOFError,
    ValueError,
    KeyError,
    IndexError,
    OverflowError,
    MemoryError,
    TypeError,
    struct.error,
)

# Places of fields in their tables.
_FOOTER_RECORD_BATCHES = 3
_MESSAGE_HEADER = 2
_RECORD_BATCH_COMPRESSION = 3


@contextmanager
def parsing(key: str, what: str) -> Iterator[None]:
    """Raise `CorruptObjectError`, `key` is not `what`, in place of what hostile bytes make Arrow and Python raise."""
    try:
        yield
    except _PARSE_ERRORS as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        raise CorruptObjectError(f"{key}: not {what}: {reason or type(error).__name__}") from error


class Block(NamedTuple):
    """Where a record batch lies in the file."""

    offset: int
    bytes: int


def record_batch_blocks(key: str, source: pa.NativeFile, size: int) -> list[Block]:
    """Blocks of the record batches in a file of `size` bytes, whose footer Arrow has verified.

    Raises:
        CorruptObjectError: they are not separate parts of the file.
        struct.error: the footer is none.
    """
    footer_bytes, _ = _TAIL.unpack(_read(source, size - _TAIL.size, _TAIL.size))
    start = size - _TAIL.size - footer_bytes
    footer = memoryview(_read(source, start, footer_bytes))
    vector = _field(footer, _root(footer), _FOOTER_RECORD_BATCHES)
    if vector is None:
        return []
    vector += _unpack("<I", footer, vector)
    count = _unpack("<I", footer, vector)
    found = _BLOCK.iter_unpack(footer[vector + 4 : vector + 4 + count * _BLOCK.size])
    blocks = [Block(offset, metadata_bytes + body_bytes) for offset, metadata_bytes, body_bytes in found]
    end = 0
    for block in sorted(blocks):
        if block.offset < end or block.bytes < 0 or block.offset + block.bytes > start:
            raise CorruptObjectError(f"{key}: record batches are not separate parts of the file")
        end = block.offset + block.bytes
    return blocks


def read_record_batch(key: str, source: pa.NativeFile, block: Block, schema: pa.Schema) -> pa.RecordBatch:
    """Read one record batch; its columns are views of the bytes read.

    Raises:
        CorruptObjectError: it is compressed, or its columns contradict each other.
        pa.ArrowException, OSError: it is no record batch.
    """
    message = pa.ipc.read_message(_read(source, block.offset, block.bytes))
    metadata = memoryview(message.metadata)
    header = _field(metadata, _root(metadata), _MESSAGE_HEADER)
    if header is not None:
        header += _unpack("<I", metadata, header)
        if _field(metadata, header, _RECORD_BATCH_COMPRESSION) is not None:
            raise CorruptObjectError(f"{key}: a record batch is compressed, which nothing stored here ever is")
    batch = pa.ipc.read_record_batch(message, schema)
    batch.validate(full=True)  # offsets that point outside the payload would be followed otherwise
    return batch


def _read(source: pa.NativeFile, offset: int, count: int) -> pa.Buffer:
    source.seek(offset)
    return source.read_buffer(count)


def _root(table: memoryview) -> int:
    return _unpack("<I", table, 0)


def _field(buffer: memoryview, table: int, number: int) -> int | None:
    """Position of a table's field, or None when it is left out."""
    fields = table - _unpack("<i", buffer, table)
    place = 4 + 2 * number
    if place >= _unpack("<H", buffer, fields):
        return None
    offset = _unpack("<H", buffer, fields + place)
    return table + offset if offset else None


def _unpack(form: str, buffer: memoryview, position: int) -> int:
    (value,) = struct.unpack_from(form, buffer, position)
    return int(value)
