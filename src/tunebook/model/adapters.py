"""LoRA and QLoRA: from the `peft` group to a PEFT configuration, and trained adapters back onto their base model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.config.choices import Compute, MasterWeights, PeftMethod
from tunebook.config.schema import RunConfig, ZeroConfig
from tunebook.config.unreached import expression, stand_for, unreached_of
from tunebook.errors import RequestError
from tunebook.facts.strategies import strategy_facts
from tunebook.model.completeness import require_complete
from tunebook.model.parameters import EMBEDDINGS
from tunebook.model.weight_files import Shapes, read_shapes

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

ADAPTER_FILE = "adapter_config.json"
# What PEFT 0.21 says of ranks for parameters, such as stacked experts, which it seeks among modules. It does use them.
IGNORED_PATTERNS = "The following (rank|alpha)_pattern keys did not match any targeted module"
# What it says of an adapter on one matrix of a tied pair: see `merged`.
UNTIED = "Model (has|with) `tie_word_embeddings=True`"
_BASE_EMBEDDINGS = tuple(f"{name}.base_layer.weight" for name in EMBEDDINGS)
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def adapter_config(config: RunConfig) -> LoraConfig | None:
    """PEFT's configuration, None for full fine-tuning. No named modules means every linear layer but the head.

    Parts that no text reaches get no adapter, which would have no gradient.
    """
    settings, unreached = config.peft, unreached_of(config.model.facts)
    if settings.method is PeftMethod.full:
        return None
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # peft divides it by the rank; a fraction is fine
        lora_dropout=settings.dropout,
        target_modules=list(settings.target_modules) or "all-linear",
        exclude_modules=expression(unreached) if unreached else None,
        modules_to_save=list(settings.modules_to_save) or None,
        use_rslora=settings.use_rslora,
    )


def four_bit(config: RunConfig) -> Any:
    """How bitsandbytes quantises the frozen base of a QLoRA run.

    Where parameters are sharded, two 4-bit weights are stored as one number of the format that the run computes in, and
    not as bytes: accelerate leaves bytes out of the sharding, with a warning only (`fsdp2_prepare_model`, 1.15), and
    FSDP2 and DeepSpeed send parameters in the format of the computation, which must not change any bit of these.
    """
    import torch
    from transformers import BitsAndBytesConfig

    make: Any = BitsAndBytesConfig  # untyped upstream
    computed = {Compute.fp32: torch.float32, Compute.fp16: torch.float16}.get(config.precision.compute, torch.bfloat16)
    return make(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=computed,
        bnb_4bit_quant_storage=computed if strategy_facts(config).divides_weights else torch.uint8,
    )


def freeze_unreached(config: RunConfig, model: Any) -> None:
    """Leave parts that no text reaches as they are.

    They have no gradient, for which DDP would wait in vain, and which DeepSpeed takes for zero: it would decay them.
    """
    unreached = unreached_of(config.model.facts)
    for name, parameter in model.named_parameters():
        if stand_for(unreached, name):
            parameter.requires_grad_(False)


def trains_in_fp32(config: RunConfig) -> bool:
    """Whether adapters are in fp32, as everywhere but where DeepSpeed casts them with a model of bf16 weights."""
    is_cast = isinstance(config.parallelism, ZeroConfig) and config.precision.master_weights is MasterWeights.bf16
    return config.peft.method is not PeftMethod.full and not is_cast


def keep_in_fp32(model: Any) -> None:
    """Put what is trained into fp32: its updates may be small beside it.

    PEFT does so with adapters and not with whole parts that it trains a copy of (`modules_to_save`), and TRL 1.16 turns
    either into bf16 over a quantised base, whatever the GPU can do.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def holds_model(folder: Path) -> bool:
    """Whether a folder is a whole model's or an adapter's."""
    return (folder / "config.json").is_file() or is_adapter(folder)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter, which needs its base model beside it."""
    return (folder / ADAPTER_FILE).is_file()


def with_adapter(base: PreTrainedModel, folder: Path, method: PeftMethod) -> PreTrainedModel:
    """The base model with a trained adapter merged into it; over quantised or 16-bit weights it stays beside them.

    A weight of 16 bits would lose of the adapter what is small beside it.
    Raises: RequestError for an adapter without weights, with damaged ones, or with others than its modules have: PEFT
    would warn, and answer with what the missing ones were initialised to.
    """
    import torch
    from peft import PeftModel

    stored = read_shapes(_adapter_files(folder))
    with warnings.catch_warnings():  # peft asks transformers by a name that has a newer one
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        warnings.filterwarnings("ignore", message="Found missing adapter keys", category=UserWarning)
        warnings.filterwarnings("ignore", message=IGNORED_PATTERNS, category=RuntimeWarning)
        warnings.filterwarnings("ignore", message=UNTIED, category=UserWarning)
        warnings.filterwarnings("ignore", message="Some weights of .* were not initialized", category=UserWarning)
        adapted: Any = PeftModel.from_pretrained(base, str(folder), ignore_mismatched_sizes=True)
    _require_whole_adapter(adapted, stored, folder)
    if method is PeftMethod.qlora or base.dtype is not torch.float32:
        # lm-eval 0.4.13 ties again what loading has tied, which fails where PEFT has put a copy of the head.
        adapted.tie_weights = lambda: None
        beside: PreTrainedModel = adapted
        return beside
    return merged(adapted)


def merged(adapted: Any) -> PreTrainedModel:
    """A model with its adapter merged into it.

    Where one matrix of a tied pair (embeddings and output head) was trained and the other not, or each for itself, the
    model has two afterwards, and its configuration says so (`tie_word_embeddings`) for whoever saves or loads it.
    """
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer

    pair: tuple[Any, Any] = adapted.get_input_embeddings(), adapted.get_output_embeddings()
    for matrix, other in (pair, pair[::-1]):
        # Merged in place, an adapter on one of the two would change both.
        if isinstance(matrix, BaseTunerLayer) and other is not None and other.weight is matrix.weight:
            other.weight = torch.nn.Parameter(other.weight.detach().clone(), requires_grad=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Input and output embeddings are no longer", category=UserWarning)
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


def _adapter_files(folder: Path) -> list[Path]:
    files = [file for name in _ADAPTER_WEIGHTS if (file := folder / name).is_file()]
    if not files:
        raise RequestError(
            f"{folder} has {ADAPTER_FILE} and no weights ({' or '.join(_ADAPTER_WEIGHTS)}); copy the whole folder "
            "again, or name another run",
            problem_id="weights-file-missing",
        )
    return files[:1]


def adapter_shapes(adapted: Any) -> Shapes:
    """The tensors that belong into an adapter's file, by their names there."""
    from peft import get_peft_model_state_dict

    # False: the embeddings of a base model whose vocabulary was changed, which no run of ours does.
    weights = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def _require_whole_adapter(adapted: Any, stored: Shapes, folder: Path) -> None:
    expected = adapter_shapes(adapted)
    # Beside an adapter on the embeddings PEFT writes the base's own, which it takes for changed.
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
