"""Which tokens of a rendered conversation are answers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from storage.errors import SpecError
from storage.options import S3Options
from tests.helpers.tiny import tiny_tokenizer, write_jsonl
from workers.chat import ChatRenderer
from workers.data import load_data
from workers.options import DataOptions

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
)
GENERATION_MARKS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{{ '<|bos|>' }}{% for m in messages %}"
    "{{ '<|head|>' + m['role'] + '<|/head|>\n\n' + m['content'] | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
CLOSED_WHEN_COMPLETE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|eot|>' }}{% endif %}"
)
NEXT_TURN_ENDS = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
NO_SPECIAL_TOKENS = "{% for m in messages %}{{ m['role'] | upper + ': ' + m['content'] + '\n\n' }}{% endfor %}"
SYSTEM_INSIDE_USER = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\n' %}"
    "{% set rest = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + (system if loop.first else '') + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + '<|eot|>' }}{% endif %}{% endfor %}"
)
THINKING_OF_LAST_ONLY = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% set parts = m['content'].split('</think>') %}"
    "{{ '<|im_start|>assistant\n' + (m['content'] if loop.last else parts[-1]) + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|bos|>", "<|head|>", "<|/head|>", "<|eot|>", "<|user|>", "<|assistant|>")

ONE = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
TWO = [
    {"role": "system", "content": "Be Hello"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Add ä"},
    {"role": "assistant", "content": "日本 é "},
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer(special=SPECIAL)


def learned(tokenizer: PreTrainedTokenizerFast, tmp_path, template: str, messages: list[dict[str, str]]) -> str:
    """Text of the tokens that the loss is taken on, with a bar wherever they are not contiguous."""
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": messages}])
    options = DataOptions(path=str(path), messages_column="messages", chat_template=template)
    examples = load_data(options, tokenizer, S3Options()).train
    parts, previous = [], False
    for token, target in zip(examples.tokens, examples.targets, strict=True):
        if target and not previous:
            parts.append([])
        if target:
            parts[-1].append(int(token))
        previous = bool(target)
    return "|".join(tokenizer.decode(part) for part in parts)


@pytest.mark.parametrize(
    ("template", "one", "two"),
    [
        pytest.param(CHATML, "Hello<|im_end|>", "Hello<|im_end|>|日本 é <|im_end|>", id="chatml"),
        pytest.param(DEFAULT_SYSTEM, "Hello<|im_end|>", "Hello<|im_end|>|日本 é <|im_end|>", id="default_system"),
        pytest.param(GENERATION_MARKS, "Hello<|im_end|>", "Hello<|im_end|>|日本 é <|im_end|>", id="generation_marks"),
        pytest.param(LLAMA3, "Hello<|eot|>", "Hello<|eot|>|日本 é<|eot|>", id="llama3_trims"),
        pytest.param(CLOSED_WHEN_COMPLETE, "Hello<|end|>", "Hello<|end|>|日本 é <|end|>", id="closed_when_complete"),
        pytest.param(NEXT_TURN_ENDS, "Hello", "Hello<|user|>|日本 é ", id="next_turn_ends"),
        pytest.param(NO_SPECIAL_TOKENS, "Hello\n\n", "Hello\n\n|日本 é \n\n", id="no_special_tokens"),
        pytest.param(SYSTEM_INSIDE_USER, "Hello<|eot|>", "Hello<|eot|>|日本 é <|eot|>", id="system_inside_user"),
    ],
)
def test_learns_answers_and_their_end_of_turn(tokenizer, tmp_path, template, one, two):
    assert learned(tokenizer, tmp_path, template, ONE) == one
    assert learned(tokenizer, tmp_path, template, TWO) == two


def test_answer_is_what_the_template_shows_of_it(tokenizer, tmp_path):
    thought = {"role": "assistant", "content": "hm</think>yes"}
    messages = [ONE[0], thought, ONE[0], thought]
    assert learned(tokenizer, tmp_path, THINKING_OF_LAST_ONLY, messages) == "yes<|im_end|>|hm</think>yes<|im_end|>"


def test_template_that_refuses_a_conversation_names_the_row(tokenizer, tmp_path):
    with pytest.raises(SpecError, match=r"rows\.jsonl line 1: the chat template refuses .* roles must alternate"):
        learned(tokenizer, tmp_path, SYSTEM_INSIDE_USER, [ONE[0], ONE[0], ONE[1]])


@pytest.mark.parametrize(
    ("template", "times"), [("{{ messages[1].content * 2 }}", 2), ("{{ messages[0].content }}", 0)]
)
def test_template_that_hides_or_repeats_an_answer_is_refused(tokenizer, tmp_path, template, times):
    with pytest.raises(SpecError, match=f"shows the answer in message 2 {times} times, expected once"):
        learned(tokenizer, tmp_path, template, ONE)


def test_syntax_error_in_template_is_one_line(tokenizer, tmp_path):
    with pytest.raises(SpecError) as caught:
        learned(tokenizer, tmp_path, "{% for %}", ONE)
    assert "\n" not in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<\ufdd0"), max_size=8), min_size=2),
    st.sampled_from([CHATML, DEFAULT_SYSTEM, CLOSED_WHEN_COMPLETE]),
)
def test_spans_hold_exactly_the_answers(tokenizer, contents, template):
    roles = ["user", "assistant"]
    messages = [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]
    rendering = ChatRenderer(tokenizer, template)("row", messages)
    end = "<|end|>" if template == CLOSED_WHEN_COMPLETE else "<|im_end|>"
    answers = [message["content"] + end for message in messages if message["role"] == "assistant"]
    assert [rendering.text[start:stop] for start, stop in rendering.answers] == answers


def test_merged_tokens_count_when_they_hold_a_character_of_the_answer(tmp_path):
    """A byte-level tokenizer reports ` name` without its space, and joins the template's space with the answer."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained("jobs/quickstart/model")
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|end|>\n' }}{% endfor %}"
    messages = [{"role": "user", "content": "Which  day?"}, {"role": "assistant", "content": "it is  over 5."}]
    assert learned(tokenizer, tmp_path, template, messages) == " it is  over 5.<|end|>"


def test_token_shared_with_what_follows_the_answer_counts(tmp_path):
    tokenizer = PreTrainedTokenizerFast.from_pretrained("jobs/quickstart/model")
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + 's.' }}{% endfor %}"
    messages = [{"role": "user", "content": "Which"}, {"role": "assistant", "content": "5 apple"}]
    assert learned(tokenizer, tmp_path, template, messages) == "5 apples"


def test_spaces_that_the_tokenizer_trims_from_its_spans_count(tmp_path):
    """Tokenizers of Llama 3's kind report an empty span for a token that is nothing but spaces."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    template = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '|' }}{% endfor %}"
    messages = [{"role": "user", "content": "a "}, {"role": "assistant", "content": " b "}]
    assert learned(tokenizer, tmp_path, template, messages) == " b "
