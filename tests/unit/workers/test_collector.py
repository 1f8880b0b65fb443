"""The garbage collector rests from the import of `workers` until training begins."""

import subprocess
import sys

SCRIPT = """
import gc
usual = gc.get_threshold()
from workers import collector
assert gc.get_threshold() > usual
collector.resume()
assert gc.get_threshold() == usual
assert gc.get_freeze_count() > 1000
"""


def test_it_rests_until_it_resumes() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
