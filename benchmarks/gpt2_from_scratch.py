"""Make the folder of a small GPT-2 (12 blocks, 9.6 million parameters), to train from scratch on quickstart's examples.

python -m benchmarks.gpt2_from_scratch FOLDER
python -m benchmarks.fidelity --spec benchmarks/gpt2.yaml --model FOLDER --data jobs/quickstart/chat.jsonl
"""

import shutil
import sys
from pathlib import Path

from transformers import GPT2Config

TOKENIZER = Path("jobs/quickstart/model")


def main() -> None:
    """Write configuration and tokenizer; the weights are a function of the run's seed."""
    folder = Path(sys.argv[1])
    config = GPT2Config(
        vocab_size=703,
        n_embd=256,
        n_layer=12,
        n_head=8,
        n_positions=256,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / name, folder)


if __name__ == "__main__":
    main()
