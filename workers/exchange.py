"""What the ranks tell each other at a tick, in one small all-reduce: with two, each would wait for the others twice."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from storage.messages import Order, Reply, Verdict


@dataclass(frozen=True, kw_only=True)
class Told:
    """What one rank tells, or what all of them have told together."""

    sums: Tensor
    """[layers, 3], float64, on the CPU, columns as in `DeltaMeter.measure`."""
    failed: frozenset[str]
    """Layers of which a ShardWriter did not get a rank's shard."""
    unacknowledged: frozenset[str]
    """Layers of which a rank does not know yet whether the ShardWriter has accepted its shard."""
    loss_sum: float = 0.0
    label_tokens: int = 0
    input_tokens: int = 0
    reply: Reply | None = None
    """The CheckpointActor's, from rank 0."""


def exchange(told: Told, layers: Sequence[str], group: dist.ProcessGroup | None) -> Told:
    """What all ranks of `group`, a CPU group, have told. `layers`: names of the trained layers, in order."""
    vector = packed(told, layers)
    dist.all_reduce(vector, group=group)
    heard = unpacked(vector, layers)
    if heard.reply is not None and heard.reply.verdict is not None:  # the run ends: words are no numbers
        box = [told.reply]
        dist.broadcast_object_list(box, src=0, group=group)
        heard = replace(heard, reply=box[0])
    return heard


def packed(told: Told, layers: Sequence[str]) -> Tensor:
    """`told` as one vector (float64): the sum of those of all ranks is what all of them have told."""
    scalars = _numbers(told.loss_sum, told.label_tokens, told.input_tokens)
    flags = [_flags(told.failed, layers), _flags(told.unacknowledged, layers)]
    return torch.cat([scalars, _packed_reply(told.reply, layers), *flags, told.sums.flatten()])


def unpacked(vector: Tensor, layers: Sequence[str]) -> Told:
    """Inverse of `packed`; of a verdict, only that there is one."""
    count = len(layers)
    scalars, reply, failed, unacknowledged, sums = vector.split([3, _PLACES + count, count, count, 3 * count])
    loss_sum, label_tokens, input_tokens = scalars.tolist()
    return Told(
        sums=sums.view(-1, 3),
        failed=_flagged(failed, layers),
        unacknowledged=_flagged(unacknowledged, layers),
        loss_sum=loss_sum,
        label_tokens=int(label_tokens),
        input_tokens=int(input_tokens),
        reply=_unpacked_reply(reply, layers),
    )


def _numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _flags(chosen: frozenset[str], layers: Sequence[str]) -> Tensor:
    return _numbers(*(layer in chosen for layer in layers))


def _flagged(flags: Tensor, layers: Sequence[str]) -> frozenset[str]:
    return frozenset(layer for layer, number in zip(layers, flags.tolist(), strict=True) if number)


# A reply as numbers; every rank but 0 adds zeros. A step that may be None is told as one more.
_ANSWERED, _RESTORE_POINT, _WHOLE_AT, _NEEDS_FACTS, _HAS_VERDICT, _HAS_ORDER = range(6)
_DECISION, _EPOCH, _ATTEMPT, _HAS_SPREAD, _SPREAD_S, _PLACES = range(6, 12)


def _packed_reply(reply: Reply | None, layers: Sequence[str]) -> Tensor:
    packed = torch.zeros(_PLACES + len(layers), dtype=torch.float64)
    if reply is None:
        return packed
    whole_at = 0 if reply.whole_at is None else reply.whole_at + 1
    packed[:_HAS_ORDER] = _numbers(
        1, reply.restore_point, whole_at, reply.needs_attempt_facts, reply.verdict is not None
    )
    if (order := reply.order) is not None:
        spread = (order.spread_s is not None, order.spread_s or 0.0)
        packed[_HAS_ORDER:_PLACES] = _numbers(1, order.decision, order.epoch, order.attempt, *spread)
        places = {layer: place for place, layer in enumerate(order.layers, start=1)}
        packed[_PLACES:] = _numbers(*(places.get(layer, 0) for layer in layers))
    return packed


def _unpacked_reply(packed: Tensor, layers: Sequence[str]) -> Reply | None:
    facts = packed[:_PLACES].tolist()
    if not facts[_ANSWERED]:
        return None
    order = None
    if facts[_HAS_ORDER]:
        places = sorted((place, layer) for place, layer in zip(packed[_PLACES:].tolist(), layers, strict=True) if place)
        order = Order(
            decision=int(facts[_DECISION]),
            epoch=int(facts[_EPOCH]),
            attempt=int(facts[_ATTEMPT]),
            layers=tuple(layer for _, layer in places),
            spread_s=facts[_SPREAD_S] if facts[_HAS_SPREAD] else None,
        )
    return Reply(
        order=order,
        restore_point=int(facts[_RESTORE_POINT]),
        whole_at=int(facts[_WHOLE_AT]) - 1 if facts[_WHOLE_AT] else None,
        verdict=Verdict(kind="", message="") if facts[_HAS_VERDICT] else None,
        needs_attempt_facts=bool(facts[_NEEDS_FACTS]),
    )
