"""Runs of a small job under random faults, until enough of them have fired; each run is then checked to the bit.

`python -m tests.faults.campaign --help`.
"""
