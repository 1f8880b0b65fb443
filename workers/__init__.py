"""Training loop, deltas, snapshot and restore. Knows storage, not the app."""
