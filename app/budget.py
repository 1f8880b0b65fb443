"""Whether a write budget can keep the staleness bound. Needs neither the model nor the store."""

from storage.decision import smallest_write_budget
from storage.errors import SpecError
from storage.options import CheckpointOptions, parse_write_budget


def check_budget(options: CheckpointOptions, encoded_share: float) -> None:
    """Refuse a budget that cannot refresh every layer within the staleness bound.

    `encoded_share`: encoded bytes for each byte of the state, at most.
    A rate in bytes/s cannot be checked before a step has been timed; layers then go into debt at their deadline.
    """
    unit, share = parse_write_budget(options.write_budget)
    smallest = smallest_write_budget(options.staleness_bound_steps, options.interval_steps) * encoded_share
    if options.mode == "adaptive" and unit == "share" and share < smallest:
        raise SpecError(
            f"checkpoint.write_budget: expected at least 1/{1 / smallest:.0f} ({smallest:.4g}) to refresh every layer "
            f"within staleness_bound_steps = {options.staleness_bound_steps}, got {options.write_budget}; raise it, "
            "or the bound"
        )
