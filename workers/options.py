"""Options of the model, the data and training, as they stand in the job spec."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from storage.options import Options


class ModelOptions(Options):
    """Which model is post-trained."""

    path: str
    """Folder or hub id that `transformers` loads the configuration, weights and tokenizer from."""

    revision: str | None = None
    """Branch, tag or commit of a hub id; null means its default branch."""

    weights: Literal["pretrained", "random"] = "pretrained"
    """`random` builds the model from its configuration with `training.seed`, without weights."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the parameters as the optimizer holds them."""

    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention implementation of `transformers`."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""

    layers: dict[str, list[str]] | None = None
    """Override of the layers found: layer name to module-name prefixes; null finds them from the module tree."""

    freeze: list[str] = []
    """Prefixes of parameter names that are not trained (never written, never aging)."""


class DataOptions(Options):
    """Training and held-out examples."""

    path: str
    """JSONL or Parquet file, local or `s3://`; the ending says which."""

    eval_path: str | None = None
    """Held-out examples; null holds out the last `eval_examples` of `path`."""

    eval_examples: Annotated[int, Field(ge=0)] = 0
    """Number of held-out examples; 0 with no `eval_path` means no evaluation."""

    messages_column: str | None = None
    """Column of chat messages (list of `{role, content}`)."""

    prompt_column: str | None = None
    """Column of prompts, together with `answer_column`."""

    answer_column: str | None = None
    """Column of answers, together with `prompt_column`."""

    chat_template: str | None = None
    """Jinja chat template in place of the tokenizer's own."""

    max_length: Annotated[int, Field(ge=2)] = 1024
    """Longest example, in tokens."""

    too_long: Literal["refuse", "truncate", "drop"] = "refuse"
    """What happens to examples longer than `max_length`."""

    answers_only: bool = True
    """Take the loss on assistant answers only, not on prompts."""

    @model_validator(mode="after")
    def _one_layout(self) -> "DataOptions":
        pair = (self.prompt_column is not None, self.answer_column is not None)
        if self.messages_column is not None and any(pair):
            raise ValueError("give messages_column, or prompt_column and answer_column, not both")
        if self.messages_column is None and not all(pair):
            raise ValueError("give messages_column, or both prompt_column and answer_column")
        return self


class TrainingOptions(Options):
    """Optimization."""

    steps: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps; give this or `passes`."""

    passes: Annotated[float, Field(gt=0)] | None = None
    """Times through the training data; give this or `steps`."""

    global_batch: Annotated[int, Field(ge=1)] = 8
    """Examples per optimizer step, over all workers."""

    micro_batch: Annotated[int, Field(ge=1)] = 4
    """Examples per forward and backward pass of one worker."""

    learning_rate: Annotated[float, Field(gt=0)] = 2e-5
    """Peak learning rate."""

    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """AdamW's decay rates."""

    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's epsilon."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay, on matrices only."""

    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the learning rate after warm-up; `linear` and `cosine` end at 0."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises linearly from 0."""

    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Clip the global gradient norm to this; null does not clip."""

    seed: int = 0
    """Seed of data order, random weights and dropout."""

    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """`bfloat16` runs forward and backward under autocast; parameters stay in `model.dtype`."""

    eval_every_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps between evaluations on the held-out examples; null evaluates at the end only."""

    on_nonfinite: Literal["fail", "skip"] = "fail"
    """What to do with a step whose loss or gradient norm is not finite: end the run, or skip its update."""

    @model_validator(mode="after")
    def _one_length(self) -> "TrainingOptions":
        if (self.steps is None) == (self.passes is None):
            raise ValueError("give steps or passes, one of them")
        if self.global_batch % self.micro_batch:
            raise ValueError(
                f"global_batch must be a multiple of micro_batch = {self.micro_batch}, got {self.global_batch}"
            )
        return self
