"""Training loop, deltas, snapshot and restore. Knows storage, not the app."""

from workers import collector

collector.rest()  # here, as nothing of this package is imported before; `train_loop` ends it
