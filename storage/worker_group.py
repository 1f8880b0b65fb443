"""The worker group of an attempt, as the CheckpointActor sees it: which rank lives where and owns how much."""

from dataclasses import dataclass
from typing import Self

from storage.messages import AttemptFacts


@dataclass(frozen=True)
class WorkerGroup:
    """Ranks, their nodes, and the bytes each node hands over per layer (in the order of `nodes`)."""

    facts: AttemptFacts
    nodes: tuple[str, ...]
    node_bytes: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, facts: AttemptFacts) -> Self:
        """Add the ranks' bytes up by node."""
        homes = facts.node_of_rank
        nodes = tuple(dict.fromkeys(homes))
        node_bytes = {}
        for layer, sizes in facts.shard_bytes.items():
            total = dict.fromkeys(nodes, 0)
            for size, home in zip(sizes, homes, strict=True):
                total[home] += size
            node_bytes[layer] = tuple(total.values())
        return cls(facts, nodes, node_bytes)

    def bytes_on(self, node: str) -> dict[str, int]:
        """Bytes that `node` hands over, by layer."""
        index = self.nodes.index(node)
        return {layer: sizes[index] for layer, sizes in self.node_bytes.items()}

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.facts.node_of_rank)
