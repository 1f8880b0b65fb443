from dataclasses import replace

import pytest
import torch

from storage.messages import Order, Reply, Verdict
from workers.exchange import Told, exchange, packed, unpacked

LAYERS = ("embedding", "block-00", "block-01", "head")
ORDER = Order(decision=2**40 + 1, epoch=3, attempt=7, layers=("head", "embedding"), spread_s=0.1)
NOTHING = Told(sums=torch.zeros(4, 3, dtype=torch.float64), failed=frozenset(), unacknowledged=frozenset())


@pytest.mark.parametrize(
    "reply",
    [
        None,
        Reply(),
        Reply(restore_point=41, whole_at=0, needs_attempt_facts=True),
        Reply(restore_point=41, whole_at=41, order=ORDER),
        Reply(restore_point=1, order=replace(ORDER, layers=LAYERS, spread_s=None)),
        Reply(restore_point=1, order=replace(ORDER, layers=(), spread_s=0.0)),
    ],
)
def test_all_ranks_hear_what_rank_0_was_answered(reply: Reply | None) -> None:
    ranks = [replace(NOTHING, reply=reply), NOTHING, NOTHING]
    vector = torch.stack([packed(told, LAYERS) for told in ranks]).sum(0)
    assert unpacked(vector, LAYERS).reply == reply


def test_sums_add_up_and_what_one_rank_flags_is_flagged() -> None:
    sums = torch.arange(12, dtype=torch.float64).view(4, 3)
    sums[2, 2] = torch.nan  # no first moment
    failed, open_ = frozenset({"head"}), frozenset({"head", "block-00"})
    one = Told(sums=sums, failed=failed, unacknowledged=frozenset(), loss_sum=1.5, label_tokens=3, input_tokens=8)
    other = replace(one, failed=frozenset(), unacknowledged=open_, loss_sum=2.0)
    heard = unpacked(packed(one, LAYERS) + packed(other, LAYERS), LAYERS)
    torch.testing.assert_close(heard.sums, 2 * sums, equal_nan=True)
    assert (heard.failed, heard.unacknowledged) == (failed, open_)
    assert (heard.loss_sum, heard.label_tokens, heard.input_tokens) == (3.5, 6, 16)


def test_a_verdict_is_heard_word_by_word(group_of_one: None) -> None:
    reply = Reply(restore_point=5, verdict=Verdict(kind="StoreError", message="disk full"))
    assert exchange(replace(NOTHING, reply=reply), LAYERS, None).reply == reply
