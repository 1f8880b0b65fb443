"""RestorePlanner: which versions the ranks restore, and what to fall back to when some cannot be read."""

import asyncio

from storage.catalog import Catalog
from storage.committer import Committer
from storage.errors import CorruptObjectError, ObjectNotFoundError, RestoreError, TrainingError
from storage.messages import LayerPlan, RestorePlan
from storage.records import Manifest, Recovery, VersionRef
from storage.restore_plan import older, without


class RestorePlanner:
    """Plans of the committed composite. A plan that names other versions than the newest record is committed first."""

    def __init__(self, commits: Committer, catalog: Catalog, attempts_without_progress: int) -> None:
        self._commits, self._catalog, self._limit = commits, catalog, attempts_without_progress
        self._unreadable: set[VersionRef] = set()

    async def plan(self, attempt: int, writers: dict[str, str]) -> RestorePlan:
        """Plan of the committed composite; versions whose manifest cannot be read are replaced first.

        Raises:
            RestoreError: nothing can be read back whole.
            FencedError, StoreError: it cannot be committed.
        """
        while True:
            point = self._commits.ledger.committed
            found = await asyncio.gather(*(self._manifest_or_problem(ref) for ref in point.layers.values()))
            manifests = dict(zip(point.layers, found, strict=True))
            bad = {name: problem for name, problem in manifests.items() if isinstance(problem, str)}
            if not bad:
                break
            await self.fall_back(bad)
        layers = {
            name: LayerPlan(ref=point.layers[name], manifest=manifest)
            for name, manifest in manifests.items()
            if not isinstance(manifest, str)
        }
        return RestorePlan(attempt=attempt, step=point.step, layers=layers, writers=writers)

    async def _manifest_or_problem(self, ref: VersionRef) -> Manifest | str | None:
        if ref.manifest_key is None:
            return None
        try:
            return await self._commits.health.retrying(self._catalog.read_manifest, ref)
        except (CorruptObjectError, ObjectNotFoundError) as error:
            return str(error)

    async def fall_back(self, bad: dict[str, str]) -> None:
        """Commit a restore point without the versions in `bad` (layer -> what is wrong).

        Raises:
            RestoreError: there is none.
            FencedError, StoreError: it cannot be committed.
        """
        ledger, journal = self._commits.ledger, self._commits.journal
        point = ledger.committed
        for name, problem in bad.items():
            self._unreadable.add(point.layers[name])
            journal.incident("unreadable version", f"{name} at step {point.layers[name].step}: {problem}")
        replacement = without(point, bad, self._unreadable, ledger.trained, ledger.bound)
        replacement = replacement or older(self._commits.points.records, point.layers, self._unreadable)
        if replacement is None:
            problems = "; ".join(bad.values())
            raise RestoreError(
                f"no restore point can be read back whole; bring the object back from a copy: {problems}"
            )
        journal.fell_back(replacement.step, replacement.ages(ledger.trained))
        await self._commits.commit(replacement)

    async def check_progress(self, cause: str) -> None:
        """End a run that only fails; on the last try, go back one restore point first.

        Raises:
            TrainingError: the last of the attempts allowed has failed, of `cause`.
            FencedError, StoreError: the restore point before cannot be committed.
        """
        journal, committed = self._commits.journal, self._commits.ledger.committed
        stuck, step = journal.totals.attempts_without_commit, committed.step
        if stuck >= self._limit:
            raise TrainingError(
                f"{stuck} attempts in a row committed nothing new after step {step}; last cause: {cause}; "
                "mend it and run the same command again"
            )
        if stuck and stuck == self._limit - 1:
            point = older(self._commits.points.records, committed.layers, self._unreadable)
            if point is not None:
                journal.incident(
                    "previous restore point", f"step {point.step} instead of {step}: {stuck} attempts failed there"
                )
                await self._commits.commit(point)

    def recovery(self, attempt: int, cause: str) -> Recovery:
        """What the summary says of `attempt`, which goes on from the committed restore point."""
        point = self._commits.ledger.committed
        ages = point.ages(self._commits.ledger.trained)
        return Recovery(
            attempt=attempt,
            cause=cause,
            restore_point=point.step,
            steps_lost=max(0, self._commits.journal.progress.step - point.step),
            max_age=max(ages),
            mean_age=sum(ages) / len(ages),
        )
