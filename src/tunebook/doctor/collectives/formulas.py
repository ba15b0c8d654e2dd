"""Algorithm and bus bandwidth, as nccl-tests count them, so that the numbers compare with what others publish.

Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. Sizes are in bytes: for all-reduce of the
buffer, for all-gather of what every rank holds afterwards. GB are 1e9 bytes.
"""

from __future__ import annotations

ALL_REDUCE, ALL_GATHER = "all_reduce", "all_gather"
OPERATIONS = (ALL_REDUCE, ALL_GATHER)
_GB = 1e9


def algorithm_gb_per_s(num_bytes: int, seconds: float) -> float:
    """The size divided by the time."""
    return num_bytes / seconds / _GB


def bus_gb_per_s(operation: str, num_bytes: int, seconds: float, num_ranks: int) -> float:
    """What each link carries: the algorithm bandwidth times the share of the size that one rank must send."""
    return algorithm_gb_per_s(num_bytes, seconds) * bus_factor(operation, num_ranks)


def bus_factor(operation: str, num_ranks: int) -> float:
    """2(n-1)/n for all-reduce, (n-1)/n for all-gather."""
    share = (num_ranks - 1) / num_ranks
    return 2 * share if operation == ALL_REDUCE else share
