"""Which examples a step trains on, which worker takes them, and their tensors: all a function of the step."""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from workers.data import Examples

IGNORED_LABEL = -100
"""Label of a token whose prediction is not part of the loss, as `transformers` and `torch` have it."""

_ORDER, _SAMPLE = 0, 1
"""Kinds of random stream, so that no two of them share a seed."""


class Batch(NamedTuple):
    """One micro-batch; every tensor is int64 of shape `(examples, longest)`, padded on the right."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor


def batch_indices(step: int, n: int, global_batch: int, seed: int) -> npt.NDArray[np.int64]:
    """Examples of one step, shape `(global_batch,)`.

    All passes through the data, each in its own order, form one endless sequence, of which step `step` (the first is 1)
    takes the examples from `(step - 1) * global_batch` on. So a batch may straddle two passes or more.
    """
    positions = np.arange((step - 1) * global_batch, step * global_batch, dtype=np.int64)
    passes = range(int(positions[0]) // n, int(positions[-1]) // n + 1)
    orders = np.concatenate([_pass_order(seed, number, n) for number in passes])
    return orders[positions - passes[0] * n]


@lru_cache(maxsize=4)
def _pass_order(seed: int, number: int, n: int) -> npt.NDArray[np.int64]:
    """Order of the examples in pass `number`, from 0.

    Sorts random words, as numpy keeps the words of a bit generator the same over its versions, but not `permutation`
    (NEP 19): a run that goes on under another numpy must see the same data.
    """
    words = np.random.PCG64(_seed_sequence(seed, _ORDER, number)).random_raw(n)
    return np.argsort(words, kind="stable").astype(np.int64)


def sample_seed(seed: int, step: int, sample: int) -> int:
    """Seed, in `[0, 2**63)`, of what is random about one sample of one step, whichever worker takes it."""
    return int(_seed_sequence(seed, _SAMPLE, step, sample).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _seed_sequence(seed: int, *key: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed % 2**64, spawn_key=key)


def micro_batches(
    indices: npt.NDArray[np.int64], micro_batch: int, rank: int, world_size: int
) -> list[npt.NDArray[np.int64]]:
    """Micro-batches of a global batch that `rank` takes; none if there are fewer of them than workers.

    The cut into micro-batches does not depend on the world size: resizing only deals them out differently.
    """
    cut = [indices[first : first + micro_batch] for first in range(0, len(indices), micro_batch)]
    return cut[rank::world_size]


def label_count(examples: Examples, indices: Iterable[int] | npt.NDArray[np.int64]) -> int:
    """Number of tokens whose prediction is part of the loss: what the sum of losses over `indices` is divided by."""
    return sum(examples.label_tokens(int(index)) for index in indices)


def collate(examples: Examples, indices: npt.NDArray[np.int64], pad_id: int) -> Batch:
    """Tensors of one micro-batch, as long as its longest example. Labels stand where their token does: not shifted."""
    lengths = examples.offsets[indices + 1] - examples.offsets[indices]
    shape = (len(indices), int(lengths.max()))
    input_ids = np.full(shape, pad_id, np.int64)
    labels = np.full(shape, IGNORED_LABEL, np.int64)
    for row, (index, length) in enumerate(zip(indices, lengths, strict=True)):
        part = slice(examples.offsets[index], examples.offsets[index + 1])
        input_ids[row, :length] = examples.tokens[part]
        labels[row, :length] = np.where(examples.targets[part], examples.tokens[part], IGNORED_LABEL)
    attention_mask = (np.arange(shape[1]) < lengths[:, None]).astype(np.int64)
    return Batch(torch.from_numpy(input_ids), torch.from_numpy(attention_mask), torch.from_numpy(labels))
