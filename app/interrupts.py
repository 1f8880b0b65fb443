"""Ctrl-C and SIGTERM (`ray job stop` sends it) as one exception, whatever handlers libraries install."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interruptible() -> Iterator[None]:
    """Make both signals raise `KeyboardInterrupt(signal)` in the block; for the main thread only.

    Entered again behind a call that installs handlers of its own: seen, `ray.init` turns SIGTERM into `SystemExit(15)`,
    and Ray Train's `fit` turns Ctrl-C into an exit code of 1 without a word.
    """
    received: list[signal.Signals] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        raise KeyboardInterrupt(received[0])

    before = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    try:
        yield
    except KeyboardInterrupt as stop:
        if received:  # seen: `ray.get` raises one of its own, without arguments
            raise KeyboardInterrupt(received[0]) from stop
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
