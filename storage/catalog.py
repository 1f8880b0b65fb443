"""The catalog of a run: epoch claims, manifests and records in the object store. Blocking: use threads."""

from dataclasses import dataclass, field

from storage import keys
from storage.assembly import Assembly
from storage.errors import CorruptObjectError, FencedError, ObjectExistsError, ObjectNotFoundError
from storage.object_store import ObjectStore
from storage.records import EpochClaim, EpochLife, Fence, Manifest, Record, VersionRef, digest_of
from storage.store_common import ObjectInfo

LARGEST_DOCUMENT_BYTES = 64 << 20
"""No claim, record or manifest is larger; an object that is has not been written by this project."""


@dataclass(frozen=True)
class Restorable:
    """Readable records, newest first, and what was found broken on the way."""

    records: list[Record]
    unreadable: dict[str, str] = field(default_factory=dict)
    """What is wrong with a record, by its key."""

    @property
    def problems(self) -> list[str]:
        """What is wrong with records, newest first."""
        return list(self.unreadable.values())


class Catalog:
    """Reads and writes one run's catalog."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store

    # --- epochs

    def newest_claim(self) -> EpochClaim | None:
        """Claim of the highest epoch, or None for a new run."""
        claims = self.store.list(keys.EPOCHS)
        return self._read_claim(claims[-1]) if claims else None

    def claim(self, claim: EpochClaim) -> EpochClaim:
        """Claim the next free epoch for `claim` (its `epoch` is filled in).

        Raises:
            FencedError: another driver has taken the run over from this one, or won the race for the epoch.
        """
        claims = [self._read_claim(info) for info in self.store.list(keys.EPOCHS)]
        newest = claims[-1] if claims else None
        if newest and newest.driver != claim.driver and any(old.driver == claim.driver for old in claims):
            raise FencedError(_taken_over(newest))
        mine = claim.model_copy(update={"epoch": newest.epoch + 1 if newest else 1})
        key = keys.epoch_claim(mine.epoch)
        try:
            self.store.create(key, mine.to_bytes())
        except ObjectExistsError:
            # A creation can succeed with its reply lost; the retry then meets our own object.
            winner = self._read_claim(ObjectInfo(key, self.store.size(key)))
            if winner.nonce != mine.nonce:
                raise FencedError(_taken_over(winner)) from None
        return mine

    def check_fence(self, epoch: int) -> None:
        """Raises `FencedError` when an epoch higher than `epoch` has been claimed."""
        newest = self.newest_claim()
        if newest is not None and newest.epoch > epoch:
            raise FencedError(_taken_over(newest))

    def fence_older(self, epoch: int) -> None:
        """Make it impossible for every epoch below `epoch` to commit, even one that has just checked its fence.

        Each of them creates its records in sequence; what stands at the next number is created here first. An epoch
        fences before it commits, so those below one that has committed are fenced.
        """
        for older in range(epoch - 1, 0, -1):
            if self._fence(older, epoch) > 0:
                return

    def _fence(self, older: int, epoch: int) -> int:
        """Returns how many records `older` has committed."""
        while True:
            listed = self.store.list(keys.records_of(older))
            if listed and _is_fence(self.store.read(listed[-1].key)):
                return keys.seq_of(listed[-1].key)
            committed = keys.seq_of(listed[-1].key) + 1 if listed else 0
            try:
                self.store.create(keys.record(older, committed), Fence(fenced_by=epoch).to_bytes())
            except ObjectExistsError:
                continue  # a record that it committed meanwhile counts, or our own fence, its reply lost
            return committed

    def show_life(self, life: EpochLife) -> None:
        """Overwrite the epoch's sign of life.

        Raises:
            FencedError: a newer epoch has been claimed.
        """
        self.check_fence(life.epoch)
        self.store.put(keys.epoch_life(life.epoch), life.to_bytes())

    def _read_claim(self, info: ObjectInfo) -> EpochClaim:
        claim = EpochClaim.from_bytes(info.key, self._read(info))
        _check_name(info.key, keys.epoch_claim(claim.epoch))
        return claim

    # --- records and manifests

    def commit(self, record: Record) -> None:
        """Make `record` the newest restore point.

        Raises:
            FencedError: a newer epoch has been claimed.
        """
        self.check_fence(record.epoch)
        key, data = keys.record(record.epoch, record.seq), record.to_bytes()
        try:
            self.store.create(key, data)
        except ObjectExistsError:
            stored = self.store.read(key)
            if stored == data:
                return
            if _is_fence(stored):
                self.check_fence(record.epoch)
            raise

    def restorable(self) -> Restorable:
        """All readable records, newest first: highest (epoch, seq)."""
        found = Restorable([])
        for info in reversed(self.store.list(keys.RECORDS)):
            try:
                record = self._read_record(info)
            except ObjectNotFoundError:
                continue  # retention has deleted it since the listing
            except CorruptObjectError as error:
                found.unreadable[info.key] = str(error)
                continue
            if record is not None:
                found.records.append(record)
        return found

    def newest_record(self) -> Record | None:
        """Newest readable record, or None."""
        for info in reversed(self.store.list(keys.RECORDS)):
            try:
                record = self._read_record(info)
            except (ObjectNotFoundError, CorruptObjectError):
                continue
            if record is not None:
                return record
        return None

    def _read_record(self, info: ObjectInfo) -> Record | None:
        """The record that is listed, or None where a fence stands."""
        data = self._read(info)
        if _is_fence(data):
            return None
        record = Record.from_bytes(info.key, data)
        _check_name(info.key, keys.record(record.epoch, record.seq))
        return record

    def write_manifest(self, manifest: Manifest | Assembly) -> VersionRef:
        """Store the manifest of a version all of whose shards are durable; return what a record says of it."""
        version = manifest.version
        key, data = keys.manifest(**version._asdict()), manifest.to_bytes()
        self.store.put(key, data)
        return VersionRef(
            step=version.step,
            epoch=version.epoch,
            attempt=version.attempt,
            manifest_key=key,
            manifest_digest=digest_of(data),
            bytes=manifest.bytes,
        )

    def read_manifest(self, ref: VersionRef) -> Manifest:
        """Manifest that `ref` names.

        Raises:
            ObjectNotFoundError: it is gone.
            CorruptObjectError: its content is not what the record recorded.
        """
        if ref.manifest_key is None:
            raise ValueError("the base version has no manifest")
        data = self._read(ObjectInfo(ref.manifest_key, self.store.size(ref.manifest_key)))
        if digest_of(data) != ref.manifest_digest:
            raise CorruptObjectError(
                f"{ref.manifest_key}: expected digest {ref.manifest_digest}, got {digest_of(data)}; "
                "bring the object back from a copy"
            )
        return Manifest.from_bytes(ref.manifest_key, data)

    def _read(self, info: ObjectInfo) -> bytes:
        if info.bytes > LARGEST_DOCUMENT_BYTES:
            raise CorruptObjectError(
                f"{info.key}: expected at most {LARGEST_DOCUMENT_BYTES} bytes, got {info.bytes}; "
                "bring the object back from a copy"
            )
        return self.store.read(info.key)


def _check_name(key: str, own: str) -> None:
    """An object whole in itself may still be a copy of another one."""
    if key != own:
        raise CorruptObjectError(f"{key}: expected the object of this name, got {own}; bring it back from a copy")


def _is_fence(data: bytes) -> bool:
    try:
        Fence.from_bytes("", data)
    except CorruptObjectError:
        return False
    return True


def _taken_over(winner: EpochClaim) -> str:
    return (
        f"epoch {winner.epoch} of this run was claimed at {winner.claimed_at} by another driver "
        f"(pid {winner.where.pid} on {winner.where.host}); this one stops and has committed nothing since"
    )
