"""Preemption notices: nodes that whoever runs the cluster is going to take away."""

import ray


def nodes_given_notice() -> set[str]:
    """Ids of the nodes that Ray was told to drain.

    Ray has no public call for it that is not a barrier over all ranks (`ray.train.get_preemption_info`).

    Raises:
        RayError: Ray's control service does not answer.
    """
    return set(ray._private.state.state.get_draining_nodes())
