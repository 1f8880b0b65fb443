"""What a piece of the benchmark gets and gives back."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from matplotlib.figure import Figure

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """How thorough to be, and with what."""

    name: Literal["quick", "full"]
    model: Path | None
    """Folder of SmolLM2-135M-Instruct or another causal LM; None: the quickstart's small random Llama, and its data."""
    data: Path | None
    """GSM8K's train.jsonl, or any JSONL with columns `question` and `answer`."""
    repeats: int
    """How often each run of the end-to-end comparison is made."""

    def pick(self, *, quick: T, full: T) -> T:
        """One of two, by profile."""
        return quick if self.name == "quick" else full


@dataclass(frozen=True)
class Mark:
    """One line of the table: what was to be reached, and what was."""

    measure: str
    target: str
    measured: str
    met: bool | None
    """None: there is nothing to compare with, or it was not measured."""


@dataclass(frozen=True)
class Outcome:
    """What a piece measured."""

    marks: list[Mark]
    values: dict[str, Any]
    """For the record: raw values."""
    figures: dict[str, Figure] = field(default_factory=dict)
    """Plots by name."""
