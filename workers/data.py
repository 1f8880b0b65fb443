"""Training and held-out examples: tokenized once by the driver, then shared read-only by all workers."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from storage.errors import SpecError
from storage.options import S3Options
from workers.chat import ChatRenderer, Message, PlainRenderer, Rendering
from workers.options import DataOptions
from workers.rows import Row, read_rows

TOKENIZER_CALL_ROWS = 1024

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Examples:
    """Tokenized examples as three flat arrays, which Ray's object store shares without copies.

    Example `i` has the tokens `[offsets[i], offsets[i + 1])`.
    """

    tokens: npt.NDArray[np.int32]
    """Tokens of all examples, shape `(total,)`."""

    targets: npt.NDArray[np.bool_]
    """Whether a token's prediction is part of the loss, shape `(total,)`. Never true for an example's first token:
    there is nothing to predict it from."""

    offsets: npt.NDArray[np.int64]
    """First token of each example, and the total at the end, shape `(examples + 1,)`."""

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.offsets) - 1

    def label_tokens(self, index: int) -> int:
        """Number of tokens of one example whose prediction is part of the loss."""
        return int(self.targets[self.offsets[index] : self.offsets[index + 1]].sum())


@dataclass(frozen=True)
class TokenizedData:
    """What a run trains and evaluates on. `fingerprint` is the XXH3 (128 bit, hexadecimal) of all of it."""

    train: Examples
    held_out: Examples
    fingerprint: str


class _Encoded(NamedTuple):
    """One example before it goes into `Examples`."""

    tokens: npt.NDArray[np.int32]
    targets: npt.NDArray[np.bool_]


def load_data(options: DataOptions, tokenizer: PreTrainedTokenizerBase, s3: S3Options) -> TokenizedData:
    """Read and tokenize the training examples and the held-out ones.

    Raises:
        SpecError: a file, a column, a row or an example's length is not what `options` says; one line.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise SpecError(
            f"model.path: expected a fast tokenizer (one with a tokenizer.json), got {type(tokenizer).__name__}; "
            "convert it, or take another model"
        )
    columns = [options.messages_column] if options.messages_column else [options.prompt_column, options.answer_column]
    named = [column for column in columns if column is not None]
    rows = read_rows("data.path", options.path, named, s3)
    held_out = read_rows("data.eval_path", options.eval_path, named, s3) if options.eval_path else None
    rows, held_out = _split(rows, held_out, options)
    renderer = _Renderer(options, tokenizer)
    train = _tokenize(rows, renderer, tokenizer, options)
    if not len(train):
        raise SpecError(
            f"data.max_length: all {len(rows)} rows of {options.path} are longer than {options.max_length} tokens and "
            "dropped, expected at least one to train on; raise it, or set data.too_long: truncate"
        )
    evaluation = _tokenize(held_out, renderer, tokenizer, options)
    return TokenizedData(train, evaluation, _fingerprint(train, evaluation))


def _split(rows: list[Row], held_out: list[Row] | None, options: DataOptions) -> tuple[list[Row], list[Row]]:
    """Training rows and held-out rows; `held_out` are the rows of `eval_path`, of which the first ones count."""
    wanted = options.eval_examples
    if held_out is not None:
        if len(held_out) < wanted:
            raise SpecError(
                f"data.eval_examples: expected at most the {len(held_out)} rows of {options.eval_path}, got {wanted}; "
                "lower it, or 0 for all rows"
            )
        return rows, held_out[: wanted or None]
    if len(rows) <= wanted:
        raise SpecError(
            f"data.eval_examples: expected fewer than the {len(rows)} rows of {options.path}, got {wanted}; lower it, "
            "or give data.eval_path"
        )
    return rows[: len(rows) - wanted], rows[len(rows) - wanted :]


class _Renderer:
    """Turns a row into text, by the columns that the options name and the template there is."""

    def __init__(self, options: DataOptions, tokenizer: PreTrainedTokenizerFast) -> None:
        self._options = options
        self._chat: ChatRenderer | None = None
        if options.chat_template is not None or tokenizer.chat_template is not None:
            self._chat = ChatRenderer(tokenizer, options.chat_template)
        elif options.messages_column is not None:
            raise SpecError(
                "data.messages_column: the tokenizer has no chat template, expected one to render messages with; set "
                "data.chat_template, or use data.prompt_column and data.answer_column"
            )
        else:
            self._plain = PlainRenderer(tokenizer)

    def __call__(self, row: Row) -> Rendering:
        options = self._options
        if options.messages_column is not None:
            messages = _checked_messages(row, options.messages_column)
        else:
            prompt = _checked_string(row.where, str(options.prompt_column), row.values[str(options.prompt_column)])
            answer = _checked_string(row.where, str(options.answer_column), row.values[str(options.answer_column)])
            if self._chat is None:
                return self._plain(prompt, answer)
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        assert self._chat is not None  # __init__ refuses messages without a template
        return self._chat(row.where, messages)


def _checked_string(where: str, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise SpecError(f"{where}: {name}: expected a string, got {_json_type(value)}; mend the row")
    return value


def _checked_messages(row: Row, column: str) -> list[Message]:
    messages = row.values[column]
    if not isinstance(messages, list) or not messages:
        got = "an empty list" if messages == [] else _json_type(messages)
        raise SpecError(f"{row.where}: {column}: expected a list of {{role, content}}, got {got}; mend the row")
    for index, message in enumerate(messages):
        name = f"{column}[{index}]"
        if not isinstance(message, dict):
            raise SpecError(f"{row.where}: {name}: expected {{role, content}}, got {_json_type(message)}; mend the row")
        _checked_string(row.where, f"{name}.role", message.get("role"))
        _checked_string(row.where, f"{name}.content", message.get("content"))
    if not any(message["role"] == "assistant" for message in messages):
        raise SpecError(f"{row.where}: {column}: expected a message with role assistant, got none; drop the row")
    return messages


def _json_type(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _tokenize(
    rows: Sequence[Row], renderer: _Renderer, tokenizer: PreTrainedTokenizerFast, options: DataOptions
) -> Examples:
    encoded: list[_Encoded] = []
    shortened = 0
    for first in range(0, len(rows), TOKENIZER_CALL_ROWS):
        chunk = rows[first : first + TOKENIZER_CALL_ROWS]
        for row, example in zip(chunk, _encode([renderer(row) for row in chunk], tokenizer, options), strict=True):
            if len(example.tokens) > options.max_length:
                shortened += 1
            fitted = _fit(row.where, example, options)
            if fitted is not None:
                encoded.append(fitted)
    if shortened:
        done = {"truncate": "truncated", "drop": "dropped"}[options.too_long]
        logger.warning("%d of %d examples longer than %d tokens: %s", shortened, len(rows), options.max_length, done)
    return Examples(
        tokens=np.concatenate([np.empty(0, np.int32), *(example.tokens for example in encoded)]),
        targets=np.concatenate([np.empty(0, np.bool_), *(example.targets for example in encoded)]),
        offsets=np.cumsum([0, *(len(example.tokens) for example in encoded)], dtype=np.int64),
    )


def _encode(
    renderings: list[Rendering], tokenizer: PreTrainedTokenizerFast, options: DataOptions
) -> Iterator[_Encoded]:
    # The renderings already hold every special token, so the tokenizer must not add its own.
    encodings = tokenizer(
        [rendering.text for rendering in renderings],
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    for rendering, ids, spans in zip(renderings, encodings["input_ids"], encodings["offset_mapping"], strict=True):
        tokens = np.array(ids, np.int32)
        targets = _covers(spans, rendering.answers) if options.answers_only else np.ones(len(tokens), np.bool_)
        targets[:1] = False
        yield _Encoded(tokens, targets)


def _covers(token_spans: list[tuple[int, int]], answers: list[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """Which tokens hold at least one character of an answer.

    A byte-level tokenizer may report spans without the spaces a token begins with, so a token is taken to begin where
    the one before it ended.
    """
    spans = np.array(token_spans, np.int64).reshape(-1, 2)
    ends = spans[:, 1]
    begins = np.minimum(spans[:, 0], np.concatenate([[0], np.maximum.accumulate(ends)[:-1]]))
    covered = np.zeros(len(spans), np.bool_)
    for start, end in answers:
        covered |= (ends > start) & (begins < end)
    return covered


def _fit(where: str, example: _Encoded, options: DataOptions) -> _Encoded | None:
    """The example, within `max_length`; null if it is dropped."""
    length = len(example.tokens)
    if length > options.max_length:
        if options.too_long == "refuse":
            raise SpecError(
                f"{where}: {length} tokens, data.max_length is {options.max_length}; raise it, or set data.too_long to "
                "truncate or drop"
            )
        if options.too_long == "drop":
            return None
        example = _Encoded(example.tokens[: options.max_length], example.targets[: options.max_length])
    if not example.targets.any():
        what = "answer" if options.answers_only else "example"
        raise SpecError(
            f"{where}: expected a token of the {what} to learn from in the first {len(example.tokens)} of {length} "
            f"tokens, got none; raise data.max_length ({options.max_length}), set data.too_long: drop, or drop the row"
        )
    return example


def _fingerprint(*parts: Examples) -> str:
    digest = xxhash.xxh3_128()
    for examples in parts:
        # The offsets come first and end with the total, so no two different contents give the same bytes in a row.
        digest.update(np.int64(len(examples)).tobytes())
        for array in (examples.offsets, examples.tokens, examples.targets):
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
