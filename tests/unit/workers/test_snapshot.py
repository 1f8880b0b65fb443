"""Snapshots hold the values of the moment they were taken at, whatever happens to the live tensors later."""

import threading

import numpy as np
import pytest
import torch

from storage.shard_format import ShardTensor
from workers.snapshot import Snapshotter
from workers.state import StateTensor


def state(device: str) -> list[StateTensor]:
    weights = torch.arange(10_000, dtype=torch.float32, device=device)
    moments = torch.linspace(-1, 1, 777, device=device).to(torch.bfloat16)
    step = torch.tensor([3.0], device=device)
    return [
        StateTensor("w", "param", 100, weights[100:9_000]),
        StateTensor("w", "exp_avg", 0, moments),
        StateTensor("w", "step", 0, step),
    ]


def test_on_a_cpu_the_hand_over_sees_the_live_memory() -> None:
    """The put into Ray's object store, inside the hand-over, is the copy: there is no second one."""
    parts = state("cpu")
    handed: list[ShardTensor] = []
    snapshotter = Snapshotter(torch.device("cpu"))
    snapshotter.take([(parts, handed.extend)])
    snapshotter.before_optimizer_step()
    assert [(t.name, t.kind, t.dtype, t.first, t.count) for t in handed] == [
        ("w", "param", "float32", 100, 8_900),
        ("w", "exp_avg", "bfloat16", 0, 777),
        ("w", "step", "float32", 0, 1),
    ]
    assert np.shares_memory(handed[0].data, parts[0].tensor.numpy())
    assert handed[1].data.dtype == np.uint16


def test_on_a_cpu_an_optimizer_step_waits_for_what_is_handed_over() -> None:
    snapshotter, may_copy, copies = Snapshotter(torch.device("cpu")), threading.Event(), []

    def hand_over(tensors: list[ShardTensor]) -> None:
        may_copy.wait(60)
        copies.extend(tensor.data.copy() for tensor in tensors)

    parts = [StateTensor("w", "param", 0, torch.ones(4)), StateTensor("b", "buffer", 0, torch.ones(4))]
    snapshotter.take([(parts, hand_over)])
    parts[1].tensor.zero_()  # a forward pass may
    threading.Timer(0.2, may_copy.set).start()
    snapshotter.before_optimizer_step()
    parts[0].tensor.zero_()
    assert [copy.tolist() for copy in copies] == [[1.0] * 4, [1.0] * 4]


def test_what_a_hand_over_raises_is_raised_before_the_next_optimizer_step() -> None:
    snapshotter = Snapshotter(torch.device("cpu"))

    def hand_over(_: list[ShardTensor]) -> None:
        raise OSError("full")

    snapshotter.take([(state("cpu"), hand_over)])
    with pytest.raises(OSError, match="full"):
        snapshotter.before_optimizer_step()
    snapshotter.close()


@pytest.mark.gpu
def test_on_a_gpu_an_optimizer_step_after_it_changes_nothing() -> None:
    parts = state("cuda")
    expected = [part.tensor.float().cpu().numpy().copy() for part in parts]
    handed: list[list[np.ndarray]] = []
    snapshotter = Snapshotter(torch.device("cuda"))
    for _ in range(3):  # the pinned buffers are used again
        snapshotter.take([(parts, lambda tensors: handed.append([tensor.data.copy() for tensor in tensors]))])
    snapshotter.before_optimizer_step()
    for part in parts:
        part.tensor.zero_()
    snapshotter.close()
    assert len(handed) == 3
    for copy in handed:
        np.testing.assert_array_equal(copy[0], expected[0])
        np.testing.assert_array_equal(copy[2], expected[2])
        moments = torch.from_numpy(copy[1].view(np.int16)).view(torch.bfloat16).float().numpy()
        np.testing.assert_array_equal(moments, expected[1])
