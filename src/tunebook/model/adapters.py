"""LoRA and QLoRA: the PEFT configuration of a run, and loading trained adapters onto their base model."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.config.choices import MasterWeights, PeftMethod
from tunebook.config.model_facts import frozen_modules, is_in_modules, unreached_of
from tunebook.config.schema import RunConfig, ZeroConfig
from tunebook.errors import RequestError
from tunebook.facts.strategies import strategy_facts
from tunebook.model.parameters import EMBEDDINGS, adapts_parameters, compute_dtype, last_name
from tunebook.model.weight_files import Shapes, read_shapes, require_complete

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

ADAPTER_FILE = "adapter_config.json"
_BASE_EMBEDDINGS = tuple(f"{name}.base_layer.weight" for name in EMBEDDINGS)
_ADAPTER_WEIGHTS = "adapter_model.safetensors"


def adapter_config(
    config: RunConfig, base: PreTrainedModel | None = None, added_tokens: Collection[int] = ()
) -> LoraConfig | None:
    """PEFT's configuration; None for full fine-tuning. Without `target_modules`, every linear layer except the head.

    Parts that are not in `model.train` get no adapter. The embeddings of `added_tokens` in
    `base` are trained, and their rows of an untied head.
    """
    settings = config.peft
    if settings.method is PeftMethod.full:
        return None
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        revision=config.model.revision,  # of the base; PEFT would load the newest
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # peft divides it by the rank; a fraction is fine
        lora_dropout=settings.dropout,
        target_modules=list(settings.target_modules) or "all-linear",
        target_parameters=list(settings.target_parameters) or None,
        exclude_modules=frozen_modules(unreached_of(config.model.facts), config.model.train),
        modules_to_save=list(settings.modules_to_save) or None,
        use_rslora=settings.use_rslora,
        rank_pattern=dict(settings.rank_pattern),
        alpha_pattern=dict(settings.alpha_pattern),
        use_dora=settings.use_dora,
        trainable_token_indices=_token_rows(base, added_tokens) if base is not None and added_tokens else None,
    )


def _token_rows(base: Any, tokens: Collection[int]) -> dict[str, list[int]]:
    """PEFT's setting to train the rows of some tokens in the embeddings, and in a head that is not tied to them."""
    embeddings, head = base.get_input_embeddings(), base.get_output_embeddings()
    matrices = [embeddings] if head.weight is embeddings.weight else [embeddings, head]
    return {
        name: sorted(tokens) for name, module in base.named_modules() if any(module is matrix for matrix in matrices)
    }


def require_known_parameters(config: RunConfig, adapted: Any) -> None:
    """Refuse target parameters that the model lacks, which PEFT ignores if it finds others. Raises: RequestError."""
    if adapts_parameters(config):
        targeted = [f".{name}" for name in adapted.targeted_parameter_names]
        for name in config.peft.target_parameters:
            if not any(parameter.endswith(f".{name}") for parameter in targeted):
                raise RequestError(
                    f"peft.target_parameters: no parameter of {type(adapted.get_base_model()).__name__} has a name "
                    f"that ends in {name}; name it as in the model's weights, such as 7.mlp.experts.down_proj",
                    problem_id="adapter-module-unknown",
                )


def require_known_modules(config: RunConfig, model: Any) -> None:
    """Refuse modules to save that the model lacks, which PEFT ignores. Raises: RequestError."""
    modules = {last_name(name) for name, _ in model.named_modules()}
    for name in config.peft.modules_to_save:
        if last_name(name) not in modules:
            raise RequestError(
                f"peft.modules_to_save: {type(model).__name__} has no module {name}; type the names of its modules, "
                "such as lm_head or embed_tokens",
                problem_id="adapter-module-unknown",
            )


def require_known_layers(config: RunConfig, model: Any) -> None:
    """Refuse layers to adapt that the model lacks, and ranks and alphas of such layers. Raises: RequestError.

    The plan knows the names of layers without their numbers. PEFT ignores such a name if it finds others.
    """
    peft, modules = config.peft, [f".{name}" for name, _ in model.named_modules()]
    if peft.method is PeftMethod.full:
        return
    for field, names, as_pattern in (
        ("target_modules", peft.target_modules, re.escape),
        ("rank_pattern", peft.rank_pattern, str),  # PEFT takes regular expressions here
        ("alpha_pattern", peft.alpha_pattern, str),
    ):
        for name in names:
            if not any(re.fullmatch(rf".*\.({as_pattern(name)})", module) for module in modules):
                raise RequestError(
                    f"peft.{field}: {type(model).__name__} has no layer whose name ends in {name}; type a name such as "
                    "q_proj, or one with the layer's number such as layers.0.self_attn.q_proj",
                    problem_id="adapter-module-unknown",
                )


def four_bit(config: RunConfig) -> Any:
    """bitsandbytes' settings to quantize the frozen base of a QLoRA run.

    If parameters are sharded, the 4-bit weights are stored in the number format of the computation instead of bytes.
    accelerate does not shard bytes, with only a warning (`fsdp2_prepare_model`, 1.15), and FSDP2 and DeepSpeed convert
    parameters to the format of the computation when they send them, which must not change any bit.
    """
    import torch
    from transformers import BitsAndBytesConfig

    make: Any = BitsAndBytesConfig  # untyped upstream
    computed = compute_dtype(config)
    return make(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=computed,
        bnb_4bit_quant_storage=computed if strategy_facts(config).divides_weights else torch.uint8,
    )


def freeze_parts(config: RunConfig, model: Any) -> None:
    """Freeze the parts that are not in `model.train`.

    Those that text does not reach get no gradient from it. DDP would wait for it forever, and DeepSpeed would take it
    as zero and apply weight decay.
    """
    frozen = frozen_modules(unreached_of(config.model.facts), config.model.train)
    for name, parameter in model.named_parameters():
        if frozen is not None and re.fullmatch(frozen, name):
            parameter.requires_grad_(False)


def see_without_gradients(config: RunConfig, model: Any) -> None:
    """Have a frozen tower for images keep nothing for a backward pass.

    With recomputation transformers has gradients of its embeddings computed, as of those of text.
    """
    import torch

    unreached, base = unreached_of(config.model.facts), model.base_model
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    is_frozen = not any(is_in_modules(unreached, name) for name in trained)
    if unreached and is_frozen and hasattr(base, "get_image_features"):
        base.get_image_features = torch.no_grad()(base.get_image_features)


def trains_in_fp32(config: RunConfig) -> bool:
    """True if adapters are in fp32: always, unless DeepSpeed casts them together with bf16 weights."""
    is_cast = isinstance(config.parallelism, ZeroConfig) and config.precision.master_weights is MasterWeights.bf16
    return config.peft.method is not PeftMethod.full and not is_cast


def keep_in_fp32(model: Any) -> None:
    """Convert trained parameters to fp32, since their updates may be relatively small.

    PEFT converts adapters, but not modules that are trained whole (`modules_to_save`). TRL 1.16 converts both to bf16
    if the base is quantized, even if the GPU does not support it.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def holds_model(folder: Path) -> bool:
    """True for the folder of a whole model or an adapter."""
    return (folder / "config.json").is_file() or is_adapter(folder)


def is_adapter(folder: Path) -> bool:
    """True for the folder of an adapter, which needs its base model."""
    return (folder / ADAPTER_FILE).is_file()


def with_adapter(base: PreTrainedModel, folder: Path, method: PeftMethod) -> PreTrainedModel:
    """The base model with a trained adapter. It is merged only into fp32 weights: 16 bits would lose small updates.

    Raises: RequestError for an adapter whose weights are missing, damaged, or do not match its modules. PEFT would only
    warn and use initial values for missing ones.
    """
    import torch
    from peft import PeftModel

    stored = read_shapes([folder / _ADAPTER_WEIGHTS])
    adapted: Any = PeftModel.from_pretrained(base, str(folder), ignore_mismatched_sizes=True)
    require_whole_adapter(adapted, stored, folder)
    if method is PeftMethod.qlora or base.dtype is not torch.float32:
        # lm-eval 0.4.13 ties the weights again, which fails if PEFT has made a copy of the head.
        adapted.tie_weights = lambda: None
        unmerged: PreTrainedModel = adapted
        return unmerged
    return merged(adapted)


def merged(adapted: Any) -> PreTrainedModel:
    """A model with its adapter merged into it.

    If an adapter was trained on only one matrix of a tied pair (embeddings and output head), or on each separately, the
    result has two matrices, and `tie_word_embeddings` is set to false for saving and loading.
    """
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer

    pair: tuple[Any, Any] = adapted.get_input_embeddings(), adapted.get_output_embeddings()
    for matrix, other in (pair, pair[::-1]):
        # An adapter on one of the two is merged in place, which would change both.
        if isinstance(matrix, BaseTunerLayer) and other is not None and other.weight is matrix.weight:
            other.weight = torch.nn.Parameter(other.weight.detach().clone(), requires_grad=False)
    model: Any = adapted.merge_and_unload()
    tied = {
        name: other
        for name, other in model.all_tied_weights_keys.items()
        if model.get_parameter(name) is model.get_parameter(other)
    }
    if tied != model.all_tied_weights_keys:
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False
        model.all_tied_weights_keys = tied
    whole: PreTrainedModel = model
    return whole


def require_whole_adapter(adapted: Any, stored: Shapes, folder: Path) -> None:
    """Compare a model's adapter with stored shapes. Raises: RequestError if they differ."""
    from peft import get_peft_model_state_dict

    # False: the base's embeddings, which are only needed if the vocabulary was changed.
    weights = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    expected: Shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    # With an adapter on the embeddings, PEFT also writes those of the base, which it considers changed.
    stored = {name: shape for name, shape in stored.items() if not name.endswith(_BASE_EMBEDDINGS)}
    require_complete(
        missing=sorted(set(expected) - set(stored)),
        unexpected=sorted(set(stored) - set(expected)),
        mismatched=[
            f"{name} of shape {list(shape)}, where the adapter has {list(expected[name])}"
            for name, shape in sorted(stored.items())
            if shape != expected.get(name, shape)
        ],
        place=str(folder),
    )
