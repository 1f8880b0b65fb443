"""Keep libraries from talking into the command line's own output, with their own switches."""

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub.utils.tqdm import disable_progress_bars
from transformers.utils import logging as transformers_logging


def quiet_libraries() -> None:
    """Errors only, no progress bars; what this project itself warns of becomes `warning: ...` on stderr."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    disable_progress_bars()
    warnings.filterwarnings("ignore", module=r"(torch|transformers|ray|pyarrow|s3fs|aiobotocore|botocore)\b")
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(logging.Formatter("warning: %(message)s"))


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """Drop what libraries print in the block: Ray has no switch for what it prints of a dead worker, on stdout."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
