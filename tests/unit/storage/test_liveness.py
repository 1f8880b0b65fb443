"""Life and death of an epoch, told by real processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from storage import keys, liveness
from storage.catalog import Catalog
from storage.local_store import LocalStore
from storage.records import EpochLife, ProcessId
from tests.helpers.records import HERE, claim

PRINT_ME_AND_WAIT = """
import time
from storage.liveness import this_process
print(this_process().model_dump_json(), flush=True)
time.sleep(60)
"""


@pytest.fixture
def process() -> Iterator[tuple[subprocess.Popen, ProcessId]]:
    """A process, and how it names itself."""
    with subprocess.Popen([sys.executable, "-c", PRINT_ME_AND_WAIT], stdout=subprocess.PIPE, text=True) as running:
        try:
            yield running, ProcessId.model_validate_json(running.stdout.readline())
        finally:
            running.kill()


@pytest.fixture
def store(tmp_path) -> LocalStore:
    return LocalStore(tmp_path / "run")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch) -> None:
    monkeypatch.setattr(liveness, "BEAT_S", 0.1)
    monkeypatch.setattr(liveness, "PATIENCE_S", 0.5)


def test_a_killed_process_is_dead_at_once(process, store) -> None:
    running, name = process
    mine = claim(where=name)
    Catalog(store).show_life(EpochLife(epoch=mine.epoch, beat=1))
    assert not liveness.surely_dead(name)
    os.kill(running.pid, signal.SIGKILL)
    while not liveness.surely_dead(name):  # a zombie counts as dead: nobody has waited for it
        time.sleep(0.01)
    began = time.monotonic()
    assert not liveness.is_alive(store, mine)
    assert time.monotonic() - began < 0.1
    assert running.wait(5) == -signal.SIGKILL


def test_a_reused_pid_is_not_the_process(process) -> None:
    _, name = process
    assert liveness.surely_dead(name.model_copy(update={"started": "1"}))


@pytest.mark.parametrize("field", ["host", "boot_id"])
def test_processes_of_other_machines_are_never_surely_dead(field) -> None:
    here = liveness.this_process()
    elsewhere = here.model_copy(update={field: "other", "pid": 2**22 + 1, "started": "1"})
    assert not liveness.surely_dead(elsewhere)
    assert liveness.surely_dead(elsewhere.model_copy(update={field: getattr(here, field)}))


def test_a_moving_counter_is_life(store) -> None:
    catalog, mine = Catalog(store), claim(where=HERE)
    stop = threading.Event()

    def beat() -> None:
        count = 0
        while not stop.wait(0.1):
            count += 1
            catalog.show_life(EpochLife(epoch=mine.epoch, beat=count))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        time.sleep(0.3)
        assert liveness.is_alive(store, mine)
    finally:
        stop.set()
        thread.join()
    began = time.monotonic()
    assert not liveness.is_alive(store, mine)  # the counter stands still
    assert time.monotonic() - began >= 0.5


def test_an_epoch_that_said_it_ended_is_dead_at_once(store, process) -> None:
    _, name = process
    mine = claim(where=name)
    Catalog(store).show_life(EpochLife(epoch=mine.epoch, beat=7, ended=True))
    began = time.monotonic()
    assert not liveness.is_alive(store, mine)
    assert time.monotonic() - began < 0.1


def test_an_epoch_that_ends_while_watched_is_dead(store) -> None:
    catalog, mine = Catalog(store), claim(where=HERE)
    catalog.show_life(EpochLife(epoch=mine.epoch, beat=7))
    timer = threading.Timer(0.2, catalog.show_life, [EpochLife(epoch=mine.epoch, beat=0, ended=True)])
    timer.start()
    assert not liveness.is_alive(store, mine)
    timer.join()
    assert liveness.read_life(store, mine.epoch).ended


def test_an_epoch_that_never_showed_life_is_dead_after_patience(store) -> None:
    assert liveness.read_life(store, 1) is None
    assert not liveness.is_alive(store, claim(where=HERE))
    assert store.list(keys.EPOCHS) == []
