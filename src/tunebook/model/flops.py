"""How much a token costs to compute: what the plan's speed and the recorded MFU are both worked out from."""

from __future__ import annotations

from collections.abc import Iterable

from tunebook.config.model_facts import ModelFacts
from tunebook.model.parameters import active_parameters, of_layers


def attended_length_tokens(document_lengths: Iterable[int]) -> float:
    """The mean document length as a token sees it: sum of squares / sum. Long documents hold more of the tokens."""
    num_tokens = num_squared = 0
    for length in document_lengths:
        num_tokens += length
        num_squared += length * length
    return num_squared / num_tokens if num_tokens else 0.0


def flops_per_token(facts: ModelFacts, attended_length: float, num_trained_parameters: int | None = None) -> float:
    """Floating-point operations that training on one token needs: 6 x parameters + attention.

    Of a mixture of experts the parameters are those that a token is computed with. Embeddings that are only looked up,
    because the output head has a weight of its own, do not count.

    Products with the weights: 2 operations per parameter forward, 2 backward for the gradient of the input, and 2 for
    the gradient of the weight where it is trained: 4 x all + 2 x trained. That is 6 x parameters in a full fine-tune;
    with adapters (`num_trained_parameters`; None means all) the frozen weights count 4.

    Attention: the i-th token of a document compares itself with i keys (2 x i x hidden_size) and averages i values
    (2 x i x hidden_size). Over a document of T tokens i sums to T^2 / 2: 2 x T^2 x hidden_size per layer forward, three
    times that with the backward pass, so 6 x num_layers x hidden_size x T^2 per document, or per token
    12 x num_layers x hidden_size x T / 2 with T = `attended_length` = sum of T^2 / sum of T (`attended_length_tokens`).
    If heads have a size of their own, heads x head size stands for hidden_size. A layer with a sliding window of W
    tokens compares at most W keys: W - W^2 / (2 x T) on average instead of T / 2.

    Not counted: norms, softmax, and activations computed twice under checkpointing, so that MFU measures useful work;
    and the states of layers with linear attention, of which only the products with weights count.
    """
    active = active_parameters(facts) - (0 if facts.tie_word_embeddings else facts.vocab_size * facts.hidden_size)
    weights = 4 * active + 2 * (active if num_trained_parameters is None else num_trained_parameters)
    return weights + attention_flops_per_token(facts, attended_length)


def attention_flops_per_token(facts: ModelFacts, attended_length: float) -> float:
    """The part of `flops_per_token` that grows with the length of documents."""
    return 12 * _compared(facts, attended_length)


def _compared(facts: ModelFacts, length: float) -> float:
    """Products of a query's number with a key's that a token needs on average, over all layers."""
    measured = facts.measured
    if measured is None or measured.attention_width + measured.sliding_width == 0:
        return facts.num_layers * facts.hidden_size * length / 2
    window = measured.sliding_window
    within = length / 2 if length <= window else window - window * window / (2 * length)
    return of_layers(facts, measured.attention_width * length / 2 + measured.sliding_width * within)


def model_flops_utilization(tokens_per_second_per_gpu: float, flops: float, peak_tflops: float) -> float:
    """The share of one GPU's peak arithmetic, 0 to 1; MFU where `flops` counts useful work on real tokens only."""
    return tokens_per_second_per_gpu * flops / (peak_tflops * 1e12)
