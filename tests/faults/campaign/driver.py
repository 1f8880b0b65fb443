"""`python -m tests.faults.campaign.driver FOLDER ARGUMENTS...`: `python -m app ARGUMENTS...` with recording workers."""

import functools
import sys

import app.driver
from app.cli import main
from tests.faults.campaign.recorder import recorded_train

if __name__ == "__main__":
    app.driver.train = functools.partial(recorded_train, sys.argv[1])
    sys.exit(main(sys.argv[2:]))
