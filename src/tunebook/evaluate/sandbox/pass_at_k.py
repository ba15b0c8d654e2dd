"""pass@k: the chance that at least one of k samples is right, estimated from n samples of which c are.

Source: "Evaluating Large Language Models Trained on Code" (arXiv 2107.03374), section 2.1, as in code_eval, which the
harness uses: the unbiased estimator for each problem, and the mean over problems.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from tunebook.errors import RequestError


def pass_at_k(passed: Mapping[str, Sequence[bool]], ks: Iterable[int] = (1,)) -> dict[str, float]:
    """`{"pass@1": 0.5, ...}` from each problem's samples. Raises: RequestError for a k that there are too few for."""
    fewest = min((len(samples) for samples in passed.values()), default=0)
    scores = {}
    for k in ks:
        if not 1 <= k <= fewest:
            problem = next((name for name, samples in passed.items() if len(samples) == fewest), "none")
            raise RequestError(
                f"pass@{k} needs at least {max(k, 1)} samples of every problem, and there are {fewest} of {problem}; "
                + (f"ask for k from 1 to {fewest}, or generate more samples" if fewest else "generate samples first"),
                problem_id="too-few-samples",
            )
        estimates = [estimate_pass_at_k(len(samples), sum(samples), k) for samples in passed.values()]
        scores[f"pass@{k}"] = math.fsum(estimates) / len(estimates)
    return scores


def estimate_pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k) of one problem."""
    if num_samples - num_right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / n for n in range(num_samples - num_right + 1, num_samples + 1))
