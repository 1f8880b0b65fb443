"""Loops that numba compiles: once on a machine, at their first use, which takes seconds.

The result is kept beside the code, or in the user's cache. Compiled loops run without the interpreter's lock and check
no bounds: their callers do. numba takes 0.3 s to import and 60 MB, so modules with loops are imported where they are
first needed.
"""

from collections.abc import Callable
from typing import Any

from numba import njit, types

inlined = njit(inline="always", error_model="numpy")
"""Decorates what other loops call."""


def compiled(function: Callable[..., Any], signature: Any) -> Any:
    """`function`, compiled for the argument types of `signature`."""
    try:
        return njit(signature, cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:  # no folder can be written: every process compiles for itself
        return njit(signature, nogil=True, error_model="numpy")(function)


def only_read(element: Any) -> Any:
    """Type of a 1-D array that is only read: it may be write-protected and need not be aligned."""
    return types.Array(element, 1, "C", readonly=True, aligned=False)
