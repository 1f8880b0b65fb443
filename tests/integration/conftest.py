"""One Ray session for all runs of this folder, over before the next folder starts its own."""

from collections.abc import Iterator

import pytest

from tests.helpers.runs import Runs, ray_session


@pytest.fixture(scope="package")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with ray_session():
        yield Runs(tmp_path_factory.mktemp("jobs"))
