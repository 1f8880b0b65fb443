"""Python's garbage collector rests while a training process starts.

A start makes a million objects and next to no garbage: to look through them for some takes a tenth to a fifth of the
CPU time of the imports, which are the longest phase of a recovery.
"""

import gc

_USUAL = gc.get_threshold()
_RARE = (100_000, 50, 50)


def rest() -> None:
    """Look for garbage rarely from now on."""
    gc.set_threshold(*_RARE)


def resume() -> None:
    """Look for garbage as usual, and never again through what there is by now: it stays."""
    gc.freeze()
    gc.set_threshold(*_USUAL)
