"""Check that an exported folder gives the checkpoint's logits. Both compute a fixed input on the CPU.

transformers loads the written folder like any other model. Its logits must equal those of the checkpoint's weights in
the same number format, bit for bit if the machine's kernels are deterministic. If weights were cast or an adapter was
merged, the root mean square difference from the checkpoint's own logits must also stay within the format's rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.checkpoint.export.model import answering, cpu_attention
from tunebook.checkpoint.export.write import short_name
from tunebook.config.schema import RunConfig
from tunebook.errors import DifferenceError
from tunebook.files import sha256_file
from tunebook.model.load import attention_option

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_ROWS, _TOKENS = 2, 24
_FACTOR = 16  # maximum sum of roundings of one weight; bf16 was measured at 0.5 to 2
_LEAST_ALLOWED = 1e-4  # fp32: sums in another order


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of a comparison: the relative root mean square difference of the logits.

    For an adapter without its base the tensors themselves were compared.
    """

    is_exact: bool  # with the checkpoint itself
    difference: float
    allowed: float
    logits: str | None  # the input that gave the logits; None: tensors were compared


def logits_of(model: Any) -> torch.Tensor:
    """The logits of the fixed input in fp32. Shape: (2, 24, vocabulary)."""
    import torch

    size = model.config.get_text_config().vocab_size
    ids = (torch.arange(_ROWS * _TOKENS).reshape(_ROWS, _TOKENS) * 7919 + 17) % size
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


def load_written(folder: Path, config: RunConfig) -> PreTrainedModel:
    """Load a written folder like any other model. Raises: DifferenceError if its weights do not fill the model."""
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM
    model, info = loader.from_pretrained(
        str(folder),
        dtype="auto",
        output_loading_info=True,
        trust_remote_code=config.model.trust_remote_code,
        attn_implementation=attention_option(cpu_attention(config)),
    )
    wrong = [*map(str, info["missing_keys"]), *map(str, info["unexpected_keys"]), *map(str, info["mismatched_keys"])]
    if wrong:
        raise _differs(f"{len(wrong)} of its weights do not fill the model: {', '.join(sorted(wrong)[:5])}")
    return answering(model)


def require_same(
    written: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, folder: Path, hashes: Mapping[str, str]
) -> None:
    """Raise a DifferenceError unless logits are finite and equal.

    Two passes of the same weights are equal bit for bit on most machines, and within one rounding of `dtype` on all
    (another order of sums). Such a difference is accepted only if the files still have the `hashes` that they were
    written with, since one damaged weight may change as little.
    """
    import torch

    if not bool(written.isfinite().all()):
        raise _differs("its logits are not finite; export in the format that the run was trained in: --dtype")
    if torch.equal(written, expected):
        return
    is_rounding = _relative_difference(written, expected) <= torch.finfo(dtype).eps
    if not is_rounding or any(sha256_file(folder / name) != sha256 for name, sha256 in hashes.items()):
        raise _differs(f"its logits differ by up to {float((written - expected).abs().max()):.3g}")


def _relative_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The root mean square of the difference, relative to the other's."""
    return float((one - other).square().mean().sqrt() / other.square().mean().sqrt().clamp_min(1e-12))


def compare(written: torch.Tensor, own: torch.Tensor, dtype: torch.dtype) -> Comparison:
    """Compare the written model with the checkpoint itself. Raises: DifferenceError beyond the format's rounding."""
    import torch

    difference = _relative_difference(written, own)
    allowed = max(_FACTOR * torch.finfo(dtype).eps, _LEAST_ALLOWED)
    if not difference <= allowed:
        raise _differs(
            f"its logits differ from the checkpoint's by {difference:.3g} (root of the mean square, relative), and "
            f"rounding to {short_name(dtype)} explains {allowed:.3g}"
        )
    where = f"{_ROWS} rows of {_TOKENS} fixed token ids, on a CPU"
    return Comparison(is_exact=torch.equal(written, own), difference=difference, allowed=allowed, logits=where)


def compare_numbers(
    written: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], dtype: torch.dtype | None
) -> Comparison:
    """Compare written tensors bit for bit with the checkpoint's, cast to `dtype` if one is given.

    Raises: DifferenceError if they differ.
    """
    import torch

    expected = {name: tensor if dtype is None else tensor.to(dtype) for name, tensor in own.items()}
    others = sorted(expected.keys() ^ written.keys())
    others += [
        name for name in sorted(expected.keys() & written.keys()) if not torch.equal(written[name], expected[name])
    ]
    if others:
        raise _differs(f"{len(others)} of its tensors are others: {', '.join(others[:5])}")
    is_exact = all(torch.equal(tensor.float(), own[name].float()) for name, tensor in written.items())
    return Comparison(is_exact=is_exact, difference=0.0, allowed=0.0, logits=None)


def _differs(what: str) -> DifferenceError:
    return DifferenceError(
        f"the exported model, loaded again, is not the checkpoint's: {what}. Nothing was kept. Try another checkpoint, "
        "and report this with the run's manifest.json",
        problem_id="export-differs",
    )
