"""A slow link to a port of this machine, made by the kernel's traffic control, so that it costs no CPU."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


def can_be_slow() -> bool:
    """Whether `tc` is there and this process may use it."""
    return shutil.which("tc") is not None and os.geteuid() == 0


@contextmanager
def slow_link(port: int, bytes_per_s: float) -> Iterator[None]:
    """What is sent over loopback to `port` is limited to `bytes_per_s`; all else is as fast as ever."""
    fast, slow = "100gbit", f"{8 * bytes_per_s:.0f}bit"
    _tc("qdisc add dev lo root handle 1: htb default 10 r2q 100000")
    try:
        _tc(f"class add dev lo parent 1: classid 1:10 htb rate {fast} burst 10mb cburst 10mb")
        _tc(f"class add dev lo parent 1: classid 1:20 htb rate {slow} burst 256kb cburst 256kb")
        _tc(f"filter add dev lo protocol ip parent 1: u32 match ip dport {port} 0xffff flowid 1:20")
        yield
    finally:
        _tc("qdisc del dev lo root")


def _tc(arguments: str) -> None:
    subprocess.run(["tc", *arguments.split()], check=True, capture_output=True, text=True)
