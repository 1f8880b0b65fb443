"""Shared by all tests."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("shared CPUs", deadline=None)
settings.load_profile("shared CPUs")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
