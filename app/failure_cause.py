"""Why workers failed, told to the CheckpointActor. Without torch: it runs in Ray Train's controller."""

from typing import Any

import ray.train


class TellCause(ray.train.UserCallback):
    """Runs in Ray Train's controller: tells the CheckpointActor why the worker group is restarted."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Called when workers have failed, before they are restarted."""
        self._actor.note_failure.remote(describe_failures(worker_exceptions))


def describe_failures(failures: dict[int, Exception]) -> str:
    """One line for the summary: which ranks failed of what; a rank that died first takes others with it."""
    deaths = {
        rank: error for rank, error in failures.items() if "died" in str(error).lower() or "SYSTEM_ERROR" in str(error)
    }
    told = deaths or failures
    what = "worker process died" if deaths else last_line(next(iter(told.values())))[:160]
    return f"rank {', '.join(str(rank) for rank in sorted(told))}: {what}"


def last_line(error: BaseException) -> str:
    """What matters of one of Ray's errors, behind the traceback; of an error without a text, its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
