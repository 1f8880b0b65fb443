"""Budgets and memory that a job's codec asks for."""

import pytest

from app.budget import check_budget
from app.preflight import check_base
from storage.encoding import largest_share
from storage.errors import SpecError
from storage.options import CheckpointOptions


def options(codec: str, budget: str) -> CheckpointOptions:
    return CheckpointOptions.model_validate({"codec": codec, "write_budget": budget})


def test_a_budget_counts_encoded_bytes() -> None:
    for codec in ("raw", "lossless"):
        with pytest.raises(SpecError, match=r"expected at least 1/47 .*, got 1/100; raise it, or the bound"):
            check_budget(options(codec, "1/100"), largest_share(options(codec, "1/100"), "float32"))
    delta = options("delta", "1/250")
    check_budget(delta, largest_share(delta, "float32"))
    with pytest.raises(SpecError, match=r"expected at least 1/217 "):  # a bfloat16 state is half as large
        check_budget(delta, largest_share(delta, "bfloat16"))


def test_the_base_version_must_fit_the_object_stores() -> None:
    check_base(0, 100, 1)
    check_base(100, 100, 2)
    with pytest.raises(SpecError) as caught:
        check_base(101, 100, 2)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("checkpoint.codec: delta keeps the weights the run began with (101 bytes)")
