"""A recorded history, made up by tests."""

import numpy as np

from storage.history import Durable, LayerTable, SegmentMeta, Tick

LAYERS = ("block.0", "block.1", "embedding")


def segment(epoch: int = 1, seq: int = 0, layers: tuple[str, ...] = LAYERS) -> tuple[SegmentMeta, list[Tick]]:
    """A segment of four ticks with every field filled in; format version 1 as `tests/golden` holds it."""
    rows = {layer: row for row, layer in enumerate(layers)}
    ticks = [
        Tick(
            epoch=epoch,
            attempt=2,
            step=7 + number,
            seconds=1.5 * number,
            loss=None if number == 2 else 2.5 - number,
            step_seconds=None if number == 2 else 0.25,
            restore_point=5 + number,
            held=number == 2,
            flush=number == 3,
            sums=LayerTable(rows, np.arange(3.0 * len(layers)).reshape(-1, 3) + number),
            chosen=layers[:number],
            durable=(Durable(layers[0], 5, 1000 + number, 1.25 * number),) * (number % 2),
        )
        for number in range(4)
    ]
    table = ticks[1].sums
    assert isinstance(table, LayerTable)
    table.array[0] = (np.nan, np.inf, -np.inf)
    return SegmentMeta(epoch=epoch, seq=seq, layers=layers), ticks


def plain(ticks: list[Tick]) -> list[str]:
    """What `ticks` say, to compare: NaN equals NaN."""
    return [f"{vars(tick) | {'sums': dict(tick.sums)}}" for tick in ticks]
