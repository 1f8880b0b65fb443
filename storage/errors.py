"""Every error this project raises on purpose, under one root.

A message is one line: what, where, expected, got, what to do.
"""


class LayerCheckError(Exception):
    """Root of the project's own errors."""


class SpecError(LayerCheckError):
    """The job spec, or something it points at, cannot be used; nothing has been started or written."""


class StoreError(LayerCheckError):
    """The object store refused or failed an operation."""


class ObjectNotFoundError(StoreError):
    """No object has this key."""


class ObjectExistsError(StoreError):
    """Exclusive creation lost: another writer's object already has this key."""


class CorruptObjectError(LayerCheckError):
    """Stored bytes are not what their checksum, size or format says."""


class FencedError(LayerCheckError):
    """A newer epoch has taken over the run; this one may not commit or delete any more."""


class RunLiveError(LayerCheckError):
    """Another driver's epoch still shows life."""


class RestoreError(LayerCheckError):
    """No retained restore point can be read back whole."""


class TrainingError(LayerCheckError):
    """Training cannot go on (non-finite loss, no progress over several attempts, ...)."""
