"""ShardWriters belong to a driver: a new one lands what an old one's had accepted, and nobody ends another's."""

import asyncio
import uuid
from pathlib import Path

import numpy as np
import pytest
import ray

from storage.encoding import RAW
from storage.messages import ShardOrder
from storage.shard_format import ShardMeta, ShardTensor
from storage.writer_actor import ensure_writer, find_writer, writer_name
from storage.writer_group import WriterGroup
from tests.helpers.records import actor_setup
from tests.helpers.runs import Runs, wait_until
from tests.helpers.writers import Taken

pytestmark = pytest.mark.slow


def lives(name: str) -> bool:
    try:
        find_writer(name)
    except ValueError:
        return False
    return True


def test_what_a_dead_drivers_writer_accepted_is_inherited(runs: Runs, tmp_path: Path) -> None:
    node, run_id = ray.get_runtime_context().get_node_id(), uuid.uuid4().hex
    new, old = (actor_setup(tmp_path, run_id=run_id, driver=driver) for driver in ("new", "old"))
    new_name, old_name = (writer_name(run_id, setup.driver, node) for setup in (new, old))
    meta = ShardMeta(run="run", layer="a", step=3, optimizer_step=3, epoch=1, attempt=1, rank=0, world_size=1)
    values = np.ones(1000, dtype=np.float32)
    shard = ShardTensor("w", "param", "float32", 0, values.size, values)
    left = ensure_writer(old.storage, old.run, old_name, node)
    ray.get(left.accept.remote(ShardOrder(meta=meta, ranges=(), encoding=RAW), [shard], []))
    taken = Taken()
    errors: list[Exception] = []

    async def take_over() -> None:
        writers = WriterGroup(new, taken, errors.append)
        await writers.inherit()
        writers.follow([node])
        assert writers.names == {node: new_name}
        await writers.drain(lambda: True, 120)
        assert [stored.version for stored in taken.stored] == [meta.version]
        assert taken.failed == []
        assert lives(old_name)
        writers.end_left_behind()
        await asyncio.to_thread(wait_until, "the old writer's end", lambda: not lives(old_name))
        assert lives(new_name)

        stale = WriterGroup(old, taken, errors.append)  # its driver wakes up
        stale.follow([node])
        await asyncio.to_thread(wait_until, "another old writer", lambda: lives(old_name))
        stale.kill()
        await asyncio.to_thread(wait_until, "the old writer's end", lambda: not lives(old_name))
        assert lives(new_name)
        writers.follow([])  # the group has moved to other nodes
        await writers.drain(lambda: True, 120)
        assert lives(new_name)
        writers.follow([node])  # and back
        writers.end_left_behind()
        assert lives(new_name)
        writers.kill()
        await asyncio.to_thread(wait_until, "the new writer's end", lambda: not lives(new_name))

    asyncio.run(take_over())
    assert errors == []
