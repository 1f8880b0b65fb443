"""Hostile bytes for everything that is read from storage: `python -m tests.fuzz --inputs 100000 --seed 1`."""
