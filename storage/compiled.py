"""Loops that numba compiles: once on a machine, at their first use, which takes seconds.

The result is kept beside the code, or in the user's cache. Compiled loops run without the interpreter's lock and check
no bounds: their callers do. numba takes 0.3 s to import and 60 MB, so modules with loops are imported where they are
first needed.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

from llvmlite import binding
from numba import njit, types

inlined = njit(inline="always", error_model="numpy")
"""Decorates what other loops call."""


def compiled(function: Callable[..., Any], signature: Any) -> Any:
    """`function`, compiled for the argument types of `signature`."""
    try:
        return njit(signature, cache=True, nogil=True, error_model="numpy")(_on_its_own(function, signature))
    except Exception:  # noqa: BLE001 - no folder can be written, or a kept file is torn: for this process alone
        return njit(signature, nogil=True, error_model="numpy")(function)


def _on_its_own(function: Callable[..., Any], signature: Any) -> Callable[..., Any]:
    """A copy of `function` with a name of its own for each signature, processor, and text of its module.

    numba keeps one index of compiled code a name. Two processes that add to it at once both take the next free file,
    and from then on every process would get the one's code for the other's signature. And it writes the index first:
    who is killed then leaves one that names what was compiled of the text before.
    """
    assert isinstance(function, FunctionType)
    text = Path(function.__code__.co_filename).read_text("utf-8")
    made_for = f"{signature} {binding.get_host_cpu_name()} {binding.get_host_cpu_features().flatten()} {text}"
    copy = FunctionType(function.__code__, function.__globals__)
    copy.__qualname__ += "_" + hashlib.sha256(made_for.encode()).hexdigest()[:16]
    return copy


def only_read(element: Any) -> Any:
    """Type of a 1-D array that is only read: it may be write-protected and need not be aligned."""
    return types.Array(element, 1, "C", readonly=True, aligned=False)
