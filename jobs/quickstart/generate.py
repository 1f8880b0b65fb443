"""Write the quickstart's chat examples, tokenizer and model configuration, the same bytes every time.

    python jobs/quickstart/generate.py [OUT_DIR]

All text is made here, from small word lists and a fixed seed; nothing is taken from elsewhere.
"""

import json
import sys
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ROWS = 600
SEED = 20261129
VOCABULARY = 768
PAD, START, END = "<|pad|>", "<|start|>", "<|end|>"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|start|>assistant\\n' }}{%- endif -%}"
)

NAMES = ["Ada", "Ben", "Chloe", "Dan", "Eva", "Finn", "Gita", "Hugo", "Ines", "Jon", "Kira", "Leo", "Mina", "Noah"]
THINGS = ["apples", "books", "coins", "pens", "stamps", "shells", "cards", "marbles", "plums", "keys"]
WORDS = ["amber", "bridge", "candle", "dragon", "engine", "forest", "garden", "harbor", "island", "jacket", "kitten"]
WORDS += ["ladder", "market", "needle", "orange", "pencil", "rabbit", "silver", "tunnel", "violin", "window", "yellow"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = ["January", "February", "March", "April", "May", "June"]
MONTHS += ["July", "August", "September", "October", "November", "December"]
UNITS = [("metres", "centimetres", 100), ("hours", "minutes", 60), ("kilograms", "grams", 1000), ("weeks", "days", 7)]
SYSTEM_PROMPTS = ["Answer in one short sentence.", "You are a patient tutor.", "Be brief and exact."]

Task = Callable[[Random], tuple[str, str]]


def add(random: Random) -> tuple[str, str]:
    """Sum of two numbers."""
    a, b = random.randint(2, 60), random.randint(2, 40)
    return random.choice([f"What is {a} + {b}?", f"Add {a} and {b}."]), f"{a} + {b} = {a + b}."


def buy(random: Random) -> tuple[str, str]:
    """A story of gaining things."""
    name, thing, have, more = random.choice(NAMES), random.choice(THINGS), random.randint(2, 20), random.randint(2, 20)
    question = f"{name} has {have} {thing} and gets {more} more. How many {thing} does {name} have now?"
    return question, f"{have} + {more} = {have + more}, so {name} has {have + more} {thing}."


def give(random: Random) -> tuple[str, str]:
    """A story of giving things away."""
    name, other = random.sample(NAMES, 2)
    thing, left, gone = random.choice(THINGS), random.randint(1, 20), random.randint(2, 15)
    have = left + gone
    question = f"{name} has {have} {thing} and gives {gone} to {other}. How many are left?"
    return question, f"{have} - {gone} = {left}, so {name} has {left} {thing} left."


def weekday(random: Random) -> tuple[str, str]:
    """Day of the week some days on."""
    today, after = random.randrange(7), random.randint(1, 13)
    answer = f"{after} days after {DAYS[today]} it is {DAYS[(today + after) % 7]}."
    return f"Today is {DAYS[today]}. Which day is it in {after} days?", answer


def calendar(random: Random) -> tuple[str, str]:
    """Date some days on."""
    start = date(2027, 1, 1) + timedelta(days=random.randrange(365))
    after = random.randint(2, 20)
    end = start + timedelta(days=after)
    question = f"Which date is {after} days after {start.day} {MONTHS[start.month - 1]}?"
    return question, f"It is {end.day} {MONTHS[end.month - 1]}."


def month(random: Random) -> tuple[str, str]:
    """Neighbouring months."""
    number, (word, change) = random.randrange(12), random.choice([("after", 1), ("before", -1)])
    answer = f"{MONTHS[(number + change) % 12]} comes {word} {MONTHS[number]}."
    return f"Which month comes {word} {MONTHS[number]}?", answer


def spell(random: Random) -> tuple[str, str]:
    """Spelling, or the first and the last letter."""
    word = random.choice(WORDS)
    if random.random() < 0.5:
        return f"Spell the word {word}.", f"{word} is spelled {'-'.join(word)}."
    return f"What are the first and last letters of {word}?", f"{word} starts with {word[0]} and ends with {word[-1]}."


def order(random: Random) -> tuple[str, str]:
    """Alphabetical order of three words."""
    words = random.sample(WORDS, 3)
    return f"Put in alphabetical order: {', '.join(words)}.", f"In order: {', '.join(sorted(words))}."


def convert(random: Random) -> tuple[str, str]:
    """Conversion of units."""
    big, small, factor = random.choice(UNITS)
    amount = random.randint(2, 12)
    answer = f"{amount} {big} are {amount} x {factor} = {amount * factor} {small}."
    return f"How many {small} are {amount} {big}?", answer


def larger(random: Random) -> tuple[str, str]:
    """The larger of two numbers."""
    a, b = random.sample(range(1, 100), 2)
    return f"Which is larger, {a} or {b}?", f"{max(a, b)} is larger than {min(a, b)}."


TASKS: list[Task] = [add, buy, give, weekday, calendar, month, spell, order, convert, larger]


def conversation(random: Random) -> list[dict[str, str]]:
    """One or two questions with their answers, sometimes after a system prompt."""
    messages = []
    if random.random() < 0.2:
        messages.append({"role": "system", "content": random.choice(SYSTEM_PROMPTS)})
    # Two of the long tasks would not fit the quickstart's longest example.
    tasks = random.choices([add, month, larger], k=2) if random.random() < 0.15 else random.choices(TASKS)
    for task in tasks:
        question, answer = task(random)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


def train_tokenizer(conversations: list[list[dict[str, str]]]) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the examples' text, with single digits, so that sums are sums of digits."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # The template writes roles into the text too.
    text = [f"{message['role']}\n{message['content']}" for messages in conversations for message in messages]
    tokenizer.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )


def model_config(tokenizer: PreTrainedTokenizerFast) -> dict[str, object]:
    """A Llama small enough for two slow CPU cores, with enough blocks for their ages to differ."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def generate(out_dir: Path) -> None:
    """Write `chat.jsonl` and `model/` into `out_dir`."""
    random = Random(SEED)
    conversations = [conversation(random) for _ in range(ROWS)]
    model_dir = out_dir / "model"
    model_dir.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"messages": messages}, separators=(",", ":")) + "\n" for messages in conversations]
    (out_dir / "chat.jsonl").write_text("".join(lines))
    tokenizer = train_tokenizer(conversations)
    tokenizer.save_pretrained(model_dir)
    (model_dir / "config.json").write_text(json.dumps(model_config(tokenizer), indent=2) + "\n")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
