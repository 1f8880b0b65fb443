"""From a row's values to text, and which characters of that text are the assistant's answers."""

import re
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from storage.errors import SpecError

Message = dict[str, Any]


class Rendering(NamedTuple):
    """Text of one example, and the spans `[start, end)` of it, in characters, that a model has to learn to answer."""

    text: str
    answers: list[tuple[int, int]]


class PlainRenderer:
    """Prompt and answer as they are, one after the other, and the end-of-sequence token.

    The begin-of-sequence token goes first if the tokenizer puts one before ordinary text. Nothing is put between prompt
    and answer: a separator has to stand in one of them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        if tokenizer.eos_token is None:
            raise SpecError("model.path: the tokenizer has no end-of-sequence token, expected one; set eos_token in it")
        self._eos = str(tokenizer.eos_token)
        starts_with_bos = tokenizer.bos_token_id is not None and tokenizer("").input_ids[:1] == [tokenizer.bos_token_id]
        self._bos = str(tokenizer.bos_token) if starts_with_bos else ""

    def __call__(self, prompt: str, answer: str) -> Rendering:
        """Render one pair; the span covers the answer and the end-of-sequence token."""
        start = len(self._bos) + len(prompt)
        text = f"{self._bos}{prompt}{answer}{self._eos}"
        return Rendering(text, [(start, len(text))])


class ChatRenderer:
    """Renders conversations with a chat template, any one, and finds the answers in the result.

    How an answer is found: the conversation is rendered once more with that answer replaced by one character that
    occurs nowhere else. What the two renderings share, before and behind, is the template's and the other messages';
    what they do not share is the answer as the template shows it (trimmed, say). The end-of-turn token behind it
    belongs to it.
    Unlike renderings of growing prefixes this holds for templates that put in a default system prompt, treat the last
    turn in their own way, or close the whole conversation with another token. `{% generation %}` marks are not needed,
    and not used.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, template: str | None) -> None:
        """Take `template`, or the tokenizer's own if it is null."""
        self._tokenizer = tokenizer
        self._template = template
        # Longest first: of two tokens that start alike, the longer one is the one the tokenizer takes.
        tokens = sorted((str(token) for token in tokenizer.get_added_vocab()), key=len, reverse=True)
        special = "|".join(re.escape(token) for token in tokens)
        # A template without a special token at the end of a turn ends it with white space, mostly a newline.
        self._end_of_turn = re.compile(rf"\s*(?:{special})?" if special else r"\s*")

    def __call__(self, where: str, messages: list[Message]) -> Rendering:
        """Render one conversation.

        Raises:
            SpecError: the template refuses the conversation, or does not show an answer exactly once; names `where`.
        """
        contents = "".join(message["content"] for message in messages)
        unused = next(character for character in map(chr, range(0xFDD0, 0xFDF0)) if character not in contents)
        places = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        marked = [
            [*messages[:place], {**messages[place], "content": unused}, *messages[place + 1 :]] for place in places
        ]
        text, *marked_texts = self._render(where, [messages, *marked])
        answers = []
        for place, marked_text in zip(places, marked_texts, strict=True):
            before, *after = marked_text.split(unused)
            if len(after) != 1:
                raise SpecError(
                    f"{where}: the chat template shows the answer in message {place + 1} {len(after)} times, "
                    "expected once; set data.chat_template to one that does"
                )
            start = _shared(text, before)
            end = len(text) - _shared(text[start:][::-1], after[0][::-1])
            closing = self._end_of_turn.match(text, end)
            answers.append((start, closing.end() if closing else end))
        return Rendering(text, answers)

    def _render(self, where: str, conversations: list[list[Message]]) -> list[str]:
        # All at once, as the call costs more than the rendering.
        try:
            return list(
                self._tokenizer.apply_chat_template(conversations, chat_template=self._template, tokenize=False)
            )
        except TemplateError as error:
            reason = " ".join(str(error).split())[:200]
            raise SpecError(f"{where}: the chat template refuses this conversation: {reason}; mend the row") from error


def _shared(text: str, other: str) -> int:
    """Number of characters that both texts begin with."""
    if text.startswith(other):  # as good as always, and much faster
        return len(other)
    pairs = enumerate(zip(text, other, strict=False))
    return next((index for index, (one, two) in pairs if one != two), min(len(text), len(other)))
