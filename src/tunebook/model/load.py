"""Load the model of a run: pretrained or from the seed, checked against what was planned with.

The weights are loaded in the master precision (`precision.master_weights`); bf16 compute then comes from autocast, so
that small updates are not lost. Random weights are always drawn on the CPU in float32: the same on every machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunebook.config.base_model import model_folder_problem
from tunebook.config.book import resolve_path
from tunebook.config.choices import MasterWeights, PeftMethod, Weights
from tunebook.config.schema import ModelConfig, ModelFacts, RunConfig
from tunebook.errors import RequestError
from tunebook.model.hub import WEIGHT_FILES, check_hub_model, fetch_config, hub_problem

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Our name of a planned number -> where transformers keeps it in an architecture's config.
_CONFIG_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "tie_word_embeddings": "tie_word_embeddings",
}


def model_location(model: ModelConfig) -> str:
    """The name on the hub, or the absolute folder."""
    if model.path is not None:
        return str(resolve_path(model.path))
    assert model.name is not None
    return model.name


def check_model(model: ModelConfig) -> None:
    """Refuse a model that cannot be loaded. Raises: RequestError with what is missing and what to type."""
    if model.path is None:
        if model.weights is Weights.pretrained:
            check_hub_model(model)
        return
    if problem := model_folder_problem(model):
        raise RequestError(f"model.path={model.path}: {problem}", problem_id="model-folder")
    folder = resolve_path(model.path)
    if model.weights is Weights.pretrained and not any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES):
        raise RequestError(
            f"model.path={model.path}: {folder} has no weights ({' or '.join(WEIGHT_FILES)}); "
            "add them, or train from scratch with model.weights=random",
            problem_id="model-without-weights",
        )


def load_architecture(model: ModelConfig) -> PretrainedConfig:
    """The architecture's config, compared with the facts that were planned with."""
    from transformers import AutoConfig

    if model.path is not None:
        check_model(model)
        folder = resolve_path(model.path)
    else:
        try:
            folder = fetch_config(model)
        except RequestError:
            # Planned facts are enough for an architecture without weights: no hub needed.
            if model.weights is Weights.random and model.facts is not None:
                return architecture_from_facts(model.facts)
            raise
    try:
        architecture: PretrainedConfig = AutoConfig.from_pretrained(
            str(folder), trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise hub_problem(error, "model", model_location(model)) from error
    if model.facts is not None:
        _compare(architecture, model.facts)
    return architecture


def architecture_from_facts(facts: ModelFacts) -> PretrainedConfig:
    """An architecture with the planned sizes, for random weights where no hub can be reached."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    types = {
        name: kind
        for kind, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        for name in ([names] if isinstance(names, str) else names)
    }
    if facts.architecture not in types:
        raise RequestError(
            f"model.facts.architecture={facts.architecture} is not known to the installed transformers",
            problem_id="unknown-architecture",
        )
    architecture: PretrainedConfig = AutoConfig.for_model(
        types[facts.architecture],
        architectures=[facts.architecture],
        num_hidden_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        intermediate_size=facts.intermediate_size,
        num_attention_heads=facts.num_attention_heads,
        num_key_value_heads=facts.num_key_value_heads,
        vocab_size=facts.vocab_size,
        max_position_embeddings=facts.max_position_embeddings,
        tie_word_embeddings=facts.tie_word_embeddings,
    )
    return architecture


def _compare(architecture: PretrainedConfig, facts: ModelFacts) -> None:
    differing = [
        f"{ours}={getattr(facts, ours)} (config.json: {getattr(architecture, theirs)})"
        for ours, theirs in _CONFIG_KEYS.items()
        if hasattr(architecture, theirs) and getattr(architecture, theirs) != getattr(facts, ours)
    ]
    if differing:
        raise RequestError(
            f"the model is not the one that was planned with: model.facts {', '.join(differing)}; correct the model's "
            "file in hydra_configs/model, or set model.facts=null to read them from the model",
            problem_id="model-facts",
        )


def load_model(config: RunConfig) -> PreTrainedModel:
    """The model that training starts from, on the CPU, with the attention kernel of the run.

    Raises: RequestError for a folder without weights, missing or unexpected weights, a hub out of reach.
    """
    import torch
    from transformers import AutoModelForCausalLM

    architecture = load_architecture(config.model)
    dtype = torch.bfloat16 if config.precision.master_weights is MasterWeights.bf16 else torch.float32
    loader: Any = AutoModelForCausalLM  # its methods are untyped upstream
    options: dict[str, Any] = {
        "attn_implementation": config.attention.implementation.value,
        "trust_remote_code": config.model.trust_remote_code,
    }
    model: PreTrainedModel
    if config.model.weights is Weights.random:
        torch.manual_seed(config.training.seed)
        model = loader.from_config(architecture, dtype=torch.float32, **options)
        model.to(dtype)  # type: ignore[arg-type]
        return model
    if config.peft.method is PeftMethod.qlora:
        options["quantization_config"] = _four_bit()
    location = model_location(config.model)
    try:
        model, info = loader.from_pretrained(
            location,
            revision=config.model.revision,
            config=architecture,
            dtype=dtype,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError) as error:
        raise hub_problem(error, "model", location) from error
    _check_loading(info, location)
    return model


def _four_bit() -> Any:
    import torch
    from transformers import BitsAndBytesConfig

    make: Any = BitsAndBytesConfig  # untyped upstream
    return make(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def _check_loading(info: dict[str, Any], location: str) -> None:
    wrong = {kind: sorted(map(str, info.get(kind) or ())) for kind in ("missing_keys", "mismatched_keys")}
    wrong["unexpected_keys"] = sorted(map(str, info.get("unexpected_keys") or ()))
    found = [f"{len(keys)} {kind.replace('_', ' ')} such as {keys[0]}" for kind, keys in wrong.items() if keys]
    if found:
        raise RequestError(
            f"the weights in {location} do not fill the model: {'; '.join(found)}; a missing weight would be random. "
            "Name a complete checkpoint of this architecture",
            problem_id="weights-incomplete",
        )
