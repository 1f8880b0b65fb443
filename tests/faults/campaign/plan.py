"""Which faults strike a run, chosen by a seed: dealt from a shuffled deck, so that none is forgotten."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from storage.fault_points import POINTS

WORKERS = 2
MAX_LAG = 4
FIRST_STEP = 8
TAIL_STEPS = 12
"""Steps behind the last fault: what damage has left in old restore points is pushed out."""

Outside = Literal["node", "outage", "damage"]


@dataclass
class Plan:
    """The faults of one run: addressed ones for its spec, and (kind, step) of those that come from outside."""

    steps: int = FIRST_STEP
    addressed: list[dict[str, Any]] = field(default_factory=list)
    outside: list[tuple[Outside, int]] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Faults planned."""
        return len(self.addressed) + len(self.outside)


def deal(rng: random.Random) -> Iterator[str]:
    """Kinds of faults without end; each comes once in every round."""
    deck = [f"worker {point}" for point in POINTS["worker"]]
    deck += [f"writer {point}" for point in POINTS["writer"]] * 2
    deck += [f"actor {point}" for point in POINTS["actor"]]
    deck += ["twice", "twice", "driver", "driver damage", "node", "outage"]
    while True:
        rng.shuffle(deck)
        yield from deck


def plan_run(rng: random.Random, cards: Iterator[str], count: int) -> Plan:
    """Plan a run with about `count` faults."""
    plan = Plan()
    while plan.count < count:
        _add(plan, rng, next(cards))
        plan.steps += rng.randint(MAX_LAG + 2, MAX_LAG + 6)
    plan.steps += TAIL_STEPS
    for fault in plan.addressed:
        if fault.get("point") == "finish":
            fault["step"] = plan.steps
    return plan


def _add(plan: Plan, rng: random.Random, card: str) -> None:
    step, rank = plan.steps, rng.randrange(WORKERS)
    who, _, point = card.partition(" ")
    match who:
        case "worker" if (
            point == "restore"
        ):  # a restore has to follow; it is of a step that is less than the lag behind
            plan.addressed.append({"rank": rank, "step": step, "point": "forward"})
            plan.addressed.append({"rank": rng.randrange(WORKERS), "step": step - MAX_LAG - 1, "point": "restore"})
        case "worker":
            plan.addressed.append({"rank": rank, "step": step, "point": point})
        case "twice":
            for each in (0, 1):
                point = rng.choice(("forward", "backward", "before_tick"))
                plan.addressed.append({"rank": (rank + each) % WORKERS, "step": step, "point": point})
        case "writer":
            plan.addressed.append({"who": who, "step": step, "point": point, "rank": rank})
        case "actor":
            plan.addressed.append({"who": who, "step": step, "point": point})
        case "driver":
            plan.addressed.append({"who": who, "step": step})
            if point:
                plan.outside.append(("damage", step))
        case "node" | "outage":
            plan.outside.append((who, step))
