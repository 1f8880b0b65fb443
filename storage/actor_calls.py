"""Calls to the CheckpointActor that wait while Ray restarts it."""

import time
from typing import Any

import ray

RESTART_WAIT_S = 0.5


def patiently(actor: Any, method: str, *args: Any) -> Any:
    """Result of `method`; an actor that is being restarted is asked again, so the call may be made twice.

    Raises:
        RayActorError: the actor is gone for good.
        LayerCheckError: what the method raised.
    """
    while True:
        try:
            return ray.get(getattr(actor, method).remote(*args))
        except ray.exceptions.ActorUnavailableError:
            time.sleep(RESTART_WAIT_S)
