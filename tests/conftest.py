"""Shared by all tests."""

import os

import pytest
import torch
from hypothesis import settings

# Ray's own is 15: what two busy test processes leave starves its workers, and a run did not start within five minutes.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - its name

settings.register_profile("shared CPUs", deadline=None)
settings.load_profile("shared CPUs")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
