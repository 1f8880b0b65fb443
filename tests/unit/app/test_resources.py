"""What a cluster lacks for a job."""

import pytest

from app.job_spec import ScalingOptions
from app.resources import shortage


@pytest.mark.parametrize(
    ("gpus", "total", "expected"),
    [
        (0, {"CPU": 3.0}, None),
        (0, {"CPU": 2.0, "GPU": 8.0}, "waiting for resources: CPU 2 of 3"),
        (1, {"CPU": 3.0}, "waiting for resources: GPU 0 of 2"),
        (1, {"CPU": 4.0, "GPU": 2.0}, None),
        (1, {}, "waiting for resources: CPU 0 of 3, GPU 0 of 2"),
    ],
)
def test_a_shortage_is_named(gpus: int, total: dict[str, float], expected: str | None) -> None:
    scaling = ScalingOptions(workers=2, cpus_per_worker=1.5, gpus_per_worker=gpus)
    assert shortage(scaling, total) == expected
