"""Benchmarks: each run writes a record (commit, versions, hardware, raw values) under `benchmarks/results/`."""
