"""Restore of a composite from shards that other world sizes wrote, and what happens when one cannot be read."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from storage import keys, shard_writer
from storage.catalog import Catalog
from storage.encoding import RAW, Encoding, encoding_of
from storage.errors import LayerCheckError, StoreError
from storage.local_store import LocalStore
from storage.messages import LayerPlan, RestorePlan
from storage.options import CheckpointOptions
from storage.records import BASE, Manifest, ShardRef, VersionId
from storage.shard_format import BATCH_BYTES, ShardMeta
from storage.shard_writer import write_shard
from tests.unit.workers.models import split, tiny
from workers.layers import Layer, find_layers
from workers.optimizer import build_optimizer
from workers.options import TrainingOptions
from workers.restore import Share, read_share, readers, restore, shards_of
from workers.slices import cut
from workers.snapshot import on_host
from workers.state import model_base, slice_tensors

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("group_of_one")


class Trained:
    """A tiny model after two optimizer steps, and a way to store its layers."""

    def __init__(self, seed: int, steps: int = 2, layers_of: Callable[[Any], tuple[Layer, ...]] = find_layers) -> None:
        self.seed = seed
        self.model = tiny("llama-tied", seed)
        self.optimizer = build_optimizer(self.model, TrainingOptions(steps=9, learning_rate=1e-2))
        for step in range(steps):
            torch.manual_seed(step)
            ids = torch.randint(0, 96, (2, 8))
            self.model(input_ids=ids, labels=ids).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.layers = {layer.name: layer for layer in layers_of(self.model)}

    def store(self, store: LocalStore, layer: Layer, step: int, world_size: int, encoding: Encoding = RAW) -> LayerPlan:
        version = VersionId(layer=layer.name, step=step, epoch=1, attempt=1)
        shards = []
        for rank in range(world_size):
            part = cut(layer, self.model, rank, world_size)
            meta = ShardMeta(run="r", optimizer_step=step, rank=rank, world_size=world_size, **version._asdict())
            key = keys.shard(**version._asdict(), rank=rank, world_size=world_size)
            tensors = [on_host(view) for view in slice_tensors(part, layer, self.model, self.optimizer)]
            summary = write_shard(store, key, meta, tensors, encoding, model_base(tiny("llama-tied", self.seed)))
            shards.append(ShardRef(key=key, rank=rank, bytes=summary.bytes, digest=summary.digest, ranges=part.ranges))
        manifest = Manifest(version=version, world_size=world_size, shards=tuple(shards))
        return LayerPlan(ref=Catalog(store).write_manifest(manifest), manifest=manifest)

    def state(self, layer: Layer) -> list[torch.Tensor]:
        return [
            part.tensor.clone()
            for part in slice_tensors(cut(layer, self.model, 0, 1), layer, self.model, self.optimizer)
        ]

    def steps(self, layer: str) -> list[float]:
        parts = slice_tensors(cut(self.layers[layer], self.model, 0, 1), self.layers[layer], self.model, self.optimizer)
        return [float(part.tensor) for part in parts if part.kind == "step"]


class FailingReads(LocalStore):
    """A store that refuses to read one object, and counts what it reads."""

    failing: str | None = None

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads = Counter[str]()

    def open_reader(self, key: str):
        if key == self.failing:
            raise StoreError(f"cannot read {key}: 503")
        self.reads[key] += 1
        return super().open_reader(key)


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def plan(layers: dict[str, LayerPlan], step: int) -> RestorePlan:
    return RestorePlan(attempt=2, step=step, layers=layers, writers={})


def run(wanted: RestorePlan, store: LocalStore, target: Trained, ask=lambda bad, outage: None) -> RestorePlan:
    return restore(wanted, store, target.layers, target.model, target.optimizer, CPU, None, ask)


@pytest.mark.parametrize("batch_bytes", [BATCH_BYTES, 100], ids=["whole", "in chunks"])
def test_a_composite_of_steps_and_world_sizes_comes_back_bit_for_bit(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, batch_bytes: int
) -> None:
    monkeypatch.setattr(shard_writer, "BATCH_BYTES", batch_bytes)
    old, new, target = Trained(1, steps=1), Trained(1, steps=3), Trained(1, steps=0)
    names = list(target.layers)
    sources = {names[0]: (old, 1, 3), names[1]: (new, 3, 2)}  # the last layer stays at its base version
    layers = {
        name: source.store(store, source.layers[name], step, world) for name, (source, step, world) in sources.items()
    }
    layers[names[2]] = LayerPlan(ref=BASE, manifest=None)
    untouched = target.state(target.layers[names[2]])
    run(plan(layers, 3), store, target)
    for name, (source, _, _) in sources.items():
        assert same(target.state(target.layers[name]), source.state(source.layers[name])), name
    assert same(target.state(target.layers[names[2]]), untouched)


def test_parts_of_mixed_ages_come_back_bit_for_bit(store: LocalStore) -> None:
    """But for `step`, of which a tensor has one: it is that of the newest part."""
    trained = {steps: Trained(1, steps=steps, layers_of=split) for steps in (1, 2, 3)}
    target = Trained(1, steps=0, layers_of=split)
    base = {name: target.state(layer) for name, layer in target.layers.items()}
    steps_of = {name: index * 2 % 5 % 4 for index, name in enumerate(target.layers)}
    assert {steps_of[name] for name in target.layers if name.startswith("embedding.")} == {0, 1, 2, 3}
    layers = {
        name: trained[steps].store(store, target.layers[name], steps, world_size=1 + index % 3)
        if steps
        else LayerPlan(ref=BASE, manifest=None)
        for index, (name, steps) in enumerate(steps_of.items())
    }
    run(plan(layers, 3), store, target)
    newest: dict[str, int] = {}
    for name, layer in target.layers.items():
        for held in layer.params:
            newest[held.tensor] = max(newest.get(held.tensor, 0), steps_of[name])
    for name, layer in target.layers.items():
        parts = slice_tensors(cut(layer, target.model, 0, 1), layer, target.model, target.optimizer)
        expected = trained[steps_of[name]].state(layer) if steps_of[name] else base[name]
        for part, want in zip(parts, expected, strict=True):
            if part.kind == "step":
                want = torch.full_like(want, newest[part.name])
            assert torch.equal(part.tensor, want), (name, part.name, part.kind)


def test_a_part_that_lacks_elements_is_told(store: LocalStore) -> None:
    source, target = Trained(1, layers_of=split), Trained(1, steps=0, layers_of=split)
    name = "embedding.01"
    assert target.layers[name].params[0].first > 0
    stored = source.store(store, source.layers[name], 2, 3)
    others = {other: LayerPlan(ref=BASE, manifest=None) for other in target.layers if other != name}
    asked: list[dict[str, str]] = []

    def ask(problems: dict[str, str], outage: str | None) -> RestorePlan | None:
        asked.append(problems)
        return plan({**others, name: stored}, 2) if problems else None

    holed = replace(stored, manifest=stored.manifest.model_copy(update={"shards": stored.manifest.shards[1:]}))
    run(plan({**others, name: holed}, 2), store, target, ask)
    assert "do not hold all of" in asked[0][name]
    assert asked[1] == {}
    assert same(target.state(target.layers[name]), source.state(source.layers[name]))


def test_a_shard_that_holds_more_than_its_layer_is_refused(store: LocalStore) -> None:
    """Else it would be filled in, and the other layer might be decoded against something else than its base version."""
    source, target = Trained(1), Trained(1, steps=0)
    name, other, *_ = target.layers
    params = (*source.layers[name].params, *source.layers[other].params)
    stored = source.store(store, replace(source.layers[name], params=params), 2, 1)
    base = LayerPlan(ref=BASE, manifest=None)
    before = [target.state(layer) for layer in target.layers.values()]
    with pytest.raises(LayerCheckError, match=f"is no part of {name} in this model"):
        run(plan({**dict.fromkeys(target.layers, base), name: stored}, 2), store, target)
    assert all(same(*pair) for pair in zip(before, map(target.state, target.layers.values()), strict=True))


@pytest.mark.parametrize("layers_of", [find_layers, split])
def test_delta_comes_back_close_and_lossless_bit_for_bit(
    store: LocalStore, layers_of: Callable[[Any], tuple[Layer, ...]]
) -> None:
    trained, target = Trained(1, steps=3, layers_of=layers_of), Trained(1, steps=0, layers_of=layers_of)
    lossy, exact = list(target.layers)[1:3]
    others = target.layers.keys() - {lossy, exact}
    layers = {
        name: trained.store(store, trained.layers[name], 3, 2, encoding_of(CheckpointOptions(codec=codec)))
        for name, codec in ((lossy, "delta"), (exact, "lossless"))
    }
    base = target.state(target.layers[lossy])
    run(plan({**layers, **{name: LayerPlan(ref=BASE, manifest=None) for name in others}}, 3), store, target)
    assert same(target.state(target.layers[exact]), trained.state(trained.layers[exact]))
    wanted, got = trained.state(trained.layers[lossy]), target.state(target.layers[lossy])
    assert not same(wanted, got)
    for want, have, start in zip(wanted, got, base, strict=True):
        error, moved = (want - have).abs().max(), (want - start).abs().max()
        assert error <= moved * 1.01  # of the coarsest: first moments are signs
    assert set(target.steps(lossy)) == {3.0}


def test_delta_from_another_model_is_unreadable(store: LocalStore) -> None:
    trained, target = Trained(1), Trained(2, steps=0)
    name, *others = target.layers
    stored = trained.store(store, trained.layers[name], 2, 1, encoding_of(CheckpointOptions(codec="delta")))
    asked: list[dict[str, str]] = []

    def ask(problems: dict[str, str], outage: str | None) -> RestorePlan | None:
        asked.append(problems)
        return plan({other: LayerPlan(ref=BASE, manifest=None) for other in target.layers}, 1) if problems else None

    run(plan({name: stored, **{other: LayerPlan(ref=BASE, manifest=None) for other in others}}, 2), store, target, ask)
    assert "another base version" in asked[0][name]


def test_unreadable_shards_are_told_and_replaced_before_anything_is_filled(store: LocalStore) -> None:
    good, bad, target = Trained(1, steps=1), Trained(1, steps=3), Trained(1, steps=0)
    name = next(iter(target.layers))
    previous, newest = good.store(store, good.layers[name], 1, 2), bad.store(store, bad.layers[name], 3, 2)
    assert newest.manifest is not None
    broken = newest.manifest.shards[1].key
    damaged = bytearray(store.read(broken))
    damaged[len(damaged) // 2] ^= 16
    store.put(broken, bytes(damaged))
    others = {other: LayerPlan(ref=BASE, manifest=None) for other in target.layers if other != name}
    asked: list[dict[str, str]] = []

    def ask(problems: dict[str, str], outage: str | None) -> RestorePlan | None:
        assert outage is None
        asked.append(problems)
        assert float(target.optimizer.state[next(iter(target.model.parameters()))]["step"]) == 0
        return plan({**others, name: previous}, 1) if problems else None

    done = run(plan({**others, name: newest}, 3), store, target, ask)
    assert list(asked[0]) == [name]
    assert broken in asked[0][name]
    assert asked[1] == {}
    assert done.step == 1
    assert same(target.state(target.layers[name]), good.state(good.layers[name]))


def test_an_outage_is_waited_out_and_what_was_read_is_kept(tmp_path: Path) -> None:
    source, target = Trained(1), Trained(1, steps=0)
    store = FailingReads(tmp_path)
    layers = {name: source.store(store, layer, 2, 2) for name, layer in source.layers.items()}
    struck = layers[next(iter(layers))].manifest.shards[0].key
    store.failing = struck
    outages: list[str | None] = []

    def ask(bad: dict[str, str], outage: str | None) -> RestorePlan | None:
        assert bad == {}, "an object that may be there is not unreadable"
        outages.append(outage)
        if len(outages) == 3:
            store.failing = None
        return None if outage is None else plan(layers, 2)

    run(plan(layers, 2), store, target, ask)
    assert outages == [f"cannot read {struck}: 503"] * 3 + [None]
    assert all(store.reads[key] == 1 for key in store.reads if key != struck)
    assert all(same(target.state(target.layers[name]), source.state(source.layers[name])) for name in layers)


def test_a_manifest_that_lacks_a_shard_is_told(store: LocalStore) -> None:
    source, target = Trained(1), Trained(1, steps=0)
    name = next(iter(target.layers))
    stored = source.store(store, source.layers[name], 2, 3)
    assert stored.manifest is not None
    holed = replace(stored, manifest=stored.manifest.model_copy(update={"shards": stored.manifest.shards[:2]}))
    others = {other: LayerPlan(ref=BASE, manifest=None) for other in target.layers if other != name}
    asked: list[dict[str, str]] = []
    plans = [plan({**others, name: stored}, 2), None]

    def ask(problems: dict[str, str], outage: str | None) -> RestorePlan | None:
        assert outage is None
        asked.append(problems)
        return plans.pop(0)

    run(plan({**others, name: holed}, 2), store, target, ask)
    assert "do not hold all of" in asked[0][name]
    assert same(target.state(target.layers[name]), source.state(source.layers[name]))


class _Counting(LocalStore):
    """Counts how often each object is opened."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.opened: Counter[str] = Counter()

    def open_reader(self, key: str) -> pa.NativeFile:
        self.opened[key] += 1
        return super().open_reader(key)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_a_restore_reads_each_object_once_per_cluster(tmp_path: Path, world_size: int) -> None:
    store = _Counting(tmp_path)
    source = Trained(0)
    wanted = plan({name: source.store(store, layer, 2, 3) for name, layer in source.layers.items()}, step=2)
    base = model_base(source.model)  # all raw: nobody asks it
    shares = [read_share(store, wanted, rank, world_size, Share(), base) for rank in range(world_size)]
    assert store.opened == dict.fromkeys((shard.key for _, shard in shards_of(wanted)), 1)
    name = min(wanted.layers)  # a fallback that replaces one layer reads no other again
    replaced = replace(wanted, layers={**wanted.layers, name: source.store(store, source.layers[name], 1, 3)})
    for rank, share in enumerate(shares):
        read_share(store, replaced, rank, world_size, share, base)
    assert set(store.opened.values()) == {1}
    assert len(store.opened) == len(shards_of(wanted)) + 3


def test_every_object_has_one_reader_and_the_load_is_even(store: LocalStore) -> None:
    source = Trained(1)
    layers = {name: source.store(store, layer, 2, 4) for name, layer in source.layers.items()}
    wanted = plan(layers, 2)
    assigned = readers(wanted, 3)
    sizes = {
        shard.key: shard.bytes for planned in layers.values() if planned.manifest for shard in planned.manifest.shards
    }
    load = [sum(size for key, size in sizes.items() if assigned[key] == rank) for rank in range(3)]
    assert set(assigned) == set(sizes)
    assert max(load) - min(load) <= max(sizes.values())
