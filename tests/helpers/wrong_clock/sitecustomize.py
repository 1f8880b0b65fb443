"""Python imports this first where its folder is on PYTHONPATH: the wall clock of the process is off by so many seconds.

Only `time` is: C extensions crash on another `datetime`. libfaketime cannot do it either, see docs/decisions.md.
"""

import os
import time
from pathlib import Path

OFF_BY_S = float(os.environ["WRONG_CLOCK_S"])

_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + OFF_BY_S
time.time_ns = lambda: _time_ns() + int(OFF_BY_S * 1e9)
Path(os.environ["WRONG_CLOCK_SEEN"], str(os.getpid())).touch()  # evidence that this process has it
