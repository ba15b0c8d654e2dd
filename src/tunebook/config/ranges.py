"""The range of every number that a configuration holds, with a value to type instead of one outside it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

# Beyond it nothing that is counted or planned differs from infinity; products of a few such numbers are still numbers.
MOST = 10**15
MOST_GPUS_PER_NODE = 1024
_SHOWN_DIGITS = 20


def number_text(number: float) -> str:
    """A number as it is typed: whole ones with all their digits, unless those would fill the screen."""
    if not isinstance(number, int):
        return f"{number:g}"
    digits = str(number)
    return digits if len(digits) <= _SHOWN_DIGITS else f"{digits[:6]}... ({len(digits.lstrip('-'))} digits)"


@dataclass(frozen=True, kw_only=True)
class Range:
    """What one number may be. The ends belong to the range unless `is_open_low` or `is_open_high` says otherwise."""

    key: str
    low: float
    high: float = math.inf
    is_open_low: bool = False
    is_open_high: bool = False
    usual: str  # a value to type instead
    instead: str | None = None  # what to type instead of the key with that value

    def holds(self, value: float) -> bool:
        """Whether a value lies in the range; infinity and "not a number" never do."""
        if not is_finite(value) or abs(value) > MOST:
            return False
        above = value > self.low if self.is_open_low else value >= self.low
        below = value < self.high if self.is_open_high else value <= self.high
        return above and below

    def text(self) -> str:
        """The range in words."""
        low = f"{'above' if self.is_open_low else 'at least'} {number_text(self.low)}"
        if math.isinf(self.high):
            return low
        return f"{low} and {'below' if self.is_open_high else 'at most'} {number_text(self.high)}"

    def demand(self, value: float) -> str:
        """What a value that lies outside must be, in words."""
        if not is_finite(value):
            return f"a finite number, {self.text()}"
        return f"at most {MOST:.0e}".replace("+", "") if value > MOST and math.isinf(self.high) else self.text()


def is_finite(value: float) -> bool:
    """Whether a number is neither infinite nor "not a number"."""
    return not isinstance(value, float) or math.isfinite(value)  # isfinite cannot take a whole number of 400 digits


def _positive(key: str, usual: str) -> Range:
    """A number above zero, whole or not."""
    return Range(key=key, low=0, is_open_low=True, usual=usual)


def _count(key: str, usual: str, low: int = 1, high: float = math.inf) -> Range:
    """A whole number of things."""
    return Range(key=key, low=low, high=high, usual=usual)


def _fact(name: str, low: int = 1) -> Range:
    """A size of the model, which cannot be left out alone: all of them are read from the model instead."""
    return Range(key=f"model.facts.{name}", low=low, usual="null", instead="model.facts=null")


def _share(key: str, usual: str) -> Range:
    return Range(key=key, low=0, high=1, is_open_high=True, usual=usual)


_SOURCE_RANGES = (
    _count("max_documents", "null"),
    _count("synthetic.num_documents", "20000"),
    Range(key="synthetic.log_mean_tokens", low=0, high=20, usual="5.8"),
    Range(key="synthetic.log_sigma_tokens", low=0, high=5, usual="0.9"),
    _count("synthetic.min_tokens", "16", low=2),
    _count("synthetic.max_tokens", "4096", low=2),
    _count("synthetic.seed", "0", low=0),
)

RANGES: tuple[Range, ...] = (
    _fact("num_parameters"),
    _fact("num_layers"),
    _fact("hidden_size"),
    _fact("intermediate_size"),
    _fact("num_attention_heads"),
    _fact("num_key_value_heads"),
    _fact("vocab_size", low=2),
    _fact("max_position_embeddings", low=2),
    Range(key="model.yarn_factor", low=1, high=1024, is_open_low=True, usual="null"),
    _count("model.yarn_original_positions", "null", low=2),
    *(replace(range_, key=f"dataset.{range_.key}") for range_ in _SOURCE_RANGES),
    Range(key="dataset.validation_share", low=0, high=0.5, usual="0.05"),
    Range(key="dataset.max_bad_share", low=0, high=1, usual="0.01"),
    _positive("dataset.mean_tokens", "null"),
    _count("dataset.num_documents", "null"),
    _count("dataset.num_workers", "null"),
    _count("parallelism.allgather_bucket_size", "null"),
    _count("parallelism.reduce_bucket_size", "null"),
    _count("parallelism.max_live_parameters", "null", low=0),
    _count("parallelism.max_reuse_distance", "null", low=0),
    _count("parallelism.prefetch_bucket_size", "null", low=0),
    _count("parallelism.param_persistence_threshold", "null", low=0),
    _count("parallelism.sub_group_size", "null"),
    _count("parallelism.wrap_min_num_parameters", "100000000"),
    _count("parallelism.shard_group_size", "null"),
    _count("parallelism.sequence_group_size", "1"),
    _count("hardware.num_nodes", "1", high=100_000),
    _count("hardware.gpus_per_node", "null", high=MOST_GPUS_PER_NODE),
    _positive("hardware.memory_gib", "null"),
    _positive("hardware.host_memory_gib", "null"),
    _count("hardware.reference.gpus_per_node", "1", high=MOST_GPUS_PER_NODE),
    _positive("hardware.reference.memory_gib", "null"),
    _count("packing.row_length", "null", low=2),
    _count("activation.mlp_tile_tokens", "4096"),
    _count("peft.rank", "16"),
    _positive("peft.alpha", "32"),
    _share("peft.dropout", "0.05"),
    Range(key="optimizer.learning_rate", low=0, high=1, is_open_low=True, usual="2e-5"),
    Range(key="optimizer.weight_decay", low=0, high=1, usual="0"),
    _share("optimizer.beta1", "0.9"),
    _share("optimizer.beta2", "0.999"),
    Range(key="optimizer.epsilon", low=0, high=1, is_open_low=True, usual="1e-8"),
    _count("schedule.warmup_steps", "null", low=0),
    _share("schedule.warmup_share", "0.03"),
    Range(key="schedule.min_learning_rate", low=0, high=1, usual="0"),
    Range(key="schedule.min_learning_rate_share", low=0, high=1, usual="0.1"),
    _count("launcher.timeout_s", "1800"),
    _count("launcher.start_timeout_s", "600"),
    _count("launcher.stop_timeout_s", "300"),
    _count("launcher.node_rank", "0", low=0),
    Range(key="launcher.master_port", low=1, high=65535, usual="29400"),
    _count("launcher.max_failures", "3", low=0),
    _count("launcher.cpus_per_task", "null"),
    _count("launcher.cpus_per_worker", "1"),
    _count("evaluation.limit", "null"),
    _count("evaluation.batch_size", "16"),
    _count("evaluation.num_fewshot", "null", low=0),
    _count("evaluation.code.num_samples", "null"),
    Range(key="evaluation.code.temperature", low=0, usual="null"),
    Range(key="evaluation.code.top_p", low=0, high=1, is_open_low=True, usual="null"),
    _count("evaluation.code.max_new_tokens", "null"),
    _count("training.global_samples", "64"),
    _count("training.global_tokens", "65536"),
    _count("training.micro_batch_size", "null"),
    _count("training.max_length", "2048", low=2),
    Range(key="training.num_epochs", low=0, high=1_000_000, is_open_low=True, usual="1"),
    _count("training.max_steps", "null"),
    _positive("training.max_grad_norm", "1"),
    Range(key="training.seed", low=0, high=2**32 - 1, usual="42"),
    _count("training.log_every_steps", "1"),
    _count("training.save_every_steps", "null"),
    _count("training.keep_checkpoints", "2"),
    _count("training.evaluate_every_steps", "null"),
    _count("training.early_stopping_patience", "null"),
)
PART_RANGES = (*_SOURCE_RANGES, _positive("weight", "1"))
# Of each value of a mapping whose names the user chooses.
MAPPING_RANGES = (_count("peft.rank_pattern", "16"), _positive("peft.alpha_pattern", "32"))
