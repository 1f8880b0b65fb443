"""Patience with a failing store: bounded, and ended by any success."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from storage.errors import FencedError, ObjectExistsError, ObjectNotFoundError, StoreError

P = ParamSpec("P")
T = TypeVar("T")

RETRY_S = 1.0
PARALLEL_CALLS = 32
"""Store calls at once, on however few cores: they wait for the store."""


class StoreHealth:
    """Follows how long storage has been failing without a success in between."""

    def __init__(self, outage_s: float, note: Callable[[str, str], None]) -> None:
        """`outage_s`: the longest outage that is waited for. `note(kind, what)` records an incident."""
        self._outage_s = outage_s
        self._note = note
        self._failing_since: float | None = None
        self._threads = ThreadPoolExecutor(PARALLEL_CALLS, thread_name_prefix="store")

    def works(self) -> None:
        """A store call succeeded."""
        self._failing_since = None

    def fails(self, problem: str) -> None:
        """A store call failed, after its own retries.

        Raises:
            StoreError: the outage has lasted too long.
        """
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        self._note("store", problem)
        if now - self._failing_since > self._outage_s:
            raise StoreError(f"storage has failed for {self._outage_s:.0f} s, so the run stops: {problem}")

    async def retrying(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking store call in a thread, again and again while the store fails.

        Raises:
            FencedError, ObjectExistsError, ObjectNotFoundError: waiting cannot help.
            StoreError: the outage has lasted too long.
        """
        while True:
            try:
                calling = partial(call, *args, **kwargs)
                result = await asyncio.get_running_loop().run_in_executor(self._threads, calling)
            except (FencedError, ObjectExistsError, ObjectNotFoundError):
                raise
            except StoreError as error:
                self.fails(str(error))
                await asyncio.sleep(RETRY_S)
            else:
                self.works()
                return result
