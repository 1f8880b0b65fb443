"""One run of the campaign: the driver as a process, started again when it was killed, and what strikes from outside."""

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from app.job_spec import JobSpec
from storage.catalog import Catalog
from storage.errors import LayerCheckError
from storage.fault_points import fired_faults
from storage.object_store import ObjectStore
from storage.records import Record
from tests.faults.campaign.plan import Plan
from tests.faults.campaign.trouble import Outages, damage
from tests.faults.campaign.world import World
from tests.helpers.cluster import ROOT

POLL_S = 0.2
OUTAGE_S = 2.0
STALLED_S = 300.0
"""A run that shows no progress at all for this long hangs; long, because a loaded machine is no fault of the run."""


@dataclass
class Played:
    """What happened to a run."""

    name: str
    seconds: float = 0.0
    lives: int = 0
    """Drivers that it took."""
    outside: list[str] = field(default_factory=list)
    """Faults from outside that struck."""
    violations: list[str] = field(default_factory=list)


class Play:
    """Plays one run to its end."""

    def __init__(
        self,
        world: World,
        spec: JobSpec,
        plan: Plan,
        store: ObjectStore,
        outages: Outages,
        rng: random.Random,
        to: Path,
    ) -> None:
        """`store` is the run's, reached without the outages. `to` is the folder for logs, the spec and the hashes."""
        self._world, self._spec, self._plan, self._store = world, spec, plan, store
        self._outages, self._rng, self._to = outages, rng, to
        self._waiting = [(kind, step) for kind, step in plan.outside if kind != "damage"]
        self._damages = [step for kind, step in plan.outside if kind == "damage"]
        self.played = Played(spec.name)

    def to_the_end(self) -> Played:
        """Start drivers until one of them ends by itself."""
        began = time.monotonic()
        (self._to / "states").mkdir(parents=True)
        path = self._to / "spec.yaml"
        path.write_text(self._spec.model_dump_json(exclude_none=True))
        while self._live(path):
            pass
        self.played.seconds = round(time.monotonic() - began, 1)
        return self.played

    def _live(self, spec: Path) -> bool:
        """One life of the driver; True when it was killed as planned."""
        self.played.lives += 1
        command = [sys.executable, "-m", "tests.faults.campaign.driver", str(self._to / "states"), "run", str(spec)]
        environment = os.environ | {"RAY_ADDRESS": self._world.address}
        before = self._drivers_struck()
        with (self._to / "driver.log").open("ab") as log:
            driver = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
            try:
                self._watch(driver)
            finally:
                driver.kill()
                code = driver.wait()
        struck = self._drivers_struck() > before
        if code == -signal.SIGKILL and struck:
            self._damage()
            return True
        if code != 0 and not self.played.violations:
            last = (self._to / "driver.log").read_text().strip().splitlines()[-1:]
            self.played.violations.append(f"the driver ended with {code}: {''.join(last)}")
        return False

    def _watch(self, driver: subprocess.Popen[bytes]) -> None:
        """Strike from outside while the driver lives; end it when nothing moves any more."""
        seen, since = None, time.monotonic()
        while driver.poll() is None:
            time.sleep(POLL_S)
            record = self._record()
            step = record.step if record else 0
            self._strike_from_outside(step)
            if (now := self._movement(record)) != seen:
                seen, since = now, time.monotonic()
            if time.monotonic() - since > STALLED_S:
                self.played.violations.append(f"nothing moved for {STALLED_S:.0f} s; restore point {step}")
                return

    def _strike_from_outside(self, step: int) -> None:
        for due in [item for item in self._waiting if item[1] <= step]:
            if due[0] == "outage":
                self._waiting.remove(due)
                struck = self._outages.strike(self._spec.name, self._rng, OUTAGE_S)
                self.played.outside += [struck] if struck else []
            elif self._world.lose_a_node():  # else the workers are being restarted: later
                self._waiting.remove(due)
                self.played.outside.append("node lost")

    def _damage(self) -> None:
        """The driver has just been killed; what was planned to be damaged by now is."""
        record = self._record()
        if record is None or not any(step <= record.step + self._spec.checkpoint.max_lag for step in self._damages):
            return
        self._damages.pop(0)
        done = damage(self._store, record, self._rng)
        self.played.outside += [done] if done else []

    def _record(self) -> Record | None:
        try:
            return Catalog(self._store).newest_record()
        except LayerCheckError:  # the outage reaches the local disk, too
            return None

    def _drivers_struck(self) -> int:
        return sum(incident.what.startswith("driver") for incident in fired_faults(self._store))

    def _movement(self, record: Record | None) -> object:
        """Something that changes whenever the run gets anywhere."""
        sizes = [path.stat().st_size for path in sorted((self._to / "states").iterdir())]
        return sizes, record and (record.epoch, record.seq)
