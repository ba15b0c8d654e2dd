"""How many programs per second the sandbox judges; prints one JSON object.

    python tests/bench/sandbox_rate.py [--handover DIR] [--samples 200]

Without --handover it uses the `sandbox` service if that runs, else bubblewrap. It also prints the load of the machine
before the start: other processes take their share.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

from tunebook.evaluate.sandbox.client import open_backend, run_programs
from tunebook.evaluate.sandbox.protocol import Program

# As long as those of the usual benchmarks, and like most of them with an import: right, wrong, and one that raises.
SOURCE = '''from typing import List


def running_maximum(numbers: List[int]) -> List[int]:
    """From a list of integers, generate the list of the largest so far.
    >>> running_maximum([1, 2, 3, 2, 3, 4, 2])
    [1, 2, 3, 3, 3, 4, 4]
    """
    largest, result = None, []
    for number in numbers:
        largest = number if largest is None else {choose}(largest, number)
        result.append(largest)
    return result
'''
CHOICES = ("max", "min", "missing")
TEST = """
def check(candidate):
    assert candidate([]) == []
    assert candidate([1, 2, 3, 4]) == [1, 2, 3, 4]
    assert candidate([4, 3, 2, 1]) == [4, 4, 4, 4]
    assert candidate([3, 2, 3, 100, 3]) == [3, 3, 3, 100, 100]


check(running_maximum)
"""


def main() -> None:
    """Parse the arguments, judge the programs and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--handover", type=Path)
    parser.add_argument("--samples", type=int, default=200)
    arguments = parser.parse_args()
    choices = [CHOICES[number % len(CHOICES)] for number in range(arguments.samples)]
    programs = [
        Program(id=f"{number}-{choice}", source=SOURCE.format(choose=choice), test=TEST)
        for number, choice in enumerate(choices)
    ]
    load = os.getloadavg()[0]
    with open_backend(handover=arguments.handover) as backend:
        started = time.monotonic()
        outcomes = run_programs(programs, backend)
        seconds = time.monotonic() - started
    right = sum(outcome.is_passed for outcome in outcomes)
    measured = {
        "samples": len(outcomes),
        "right": right,
        "right_expected": choices.count("max"),
        "seconds": round(seconds, 2),
        "samples_per_second": round(len(outcomes) / seconds, 1),
        "median_s_per_sample": round(statistics.median(outcome.seconds for outcome in outcomes), 4),
        "at_a_time": backend.info.num_workers,
        "cpus": len(os.sched_getaffinity(0)),
        "load_before": round(load, 2),
    }
    print(json.dumps(measured | backend.record(), indent=2))


if __name__ == "__main__":
    main()
