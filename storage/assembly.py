"""Assembly: the shards of one layer version as they become durable, and the manifest that they add up to.

One version of every layer may be 200,000 shards. So the CheckpointActor joins what a manifest says of them, as the
ShardWriters have written it, and looks at none of them alone.
"""

from collections.abc import Mapping

from storage.records import Manifest, VersionId, sealed


class Assembly:
    """Shards of `version` that are durable, out of `world_size`."""

    def __init__(self, version: VersionId, world_size: int) -> None:
        self.version, self._world_size = version, world_size
        self._entries: dict[int, bytes] = {}
        self._sizes: dict[int, int] = {}
        self._is_complete = False

    def add(self, entries: Mapping[int, bytes], sizes: Mapping[int, int]) -> bool:
        """Take more shards, by rank: their `ShardRef` as JSON, and their bytes.

        Returns True when the last ones missing are among them.
        """
        if self._is_complete:  # told again, while the manifest may be being written
            return False
        self._entries.update(entries)
        self._sizes.update(sizes)
        self._is_complete = len(self._entries) >= self._world_size and not self.missing_ranks()
        return self._is_complete

    def missing_ranks(self) -> set[int]:
        """Ranks whose shards are not durable yet."""
        return set(range(self._world_size)) - self._entries.keys()

    def to_bytes(self) -> bytes:
        """The manifest, as `Manifest.to_bytes` gives it."""
        entries = b",".join(map(self._entries.__getitem__, sorted(self._entries)))
        empty = Manifest.model_construct(version=self.version, world_size=self._world_size, shards=())
        head = empty.model_dump_json().encode().removesuffix(b"]}")
        return sealed(head + entries + b"]}")

    @property
    def bytes(self) -> int:
        """Size of the shards together."""
        return sum(self._sizes.values())
