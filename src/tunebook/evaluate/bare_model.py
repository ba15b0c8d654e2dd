"""A model that belongs to no run here: what its folder or its name on the hub says takes the place of a run's settings.

Its own tokenizer, template and number format are taken. An exported folder may also say which run it comes from.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

from tunebook.config.choices import (
    Attention,
    Checkpointing,
    Compute,
    Generation,
    MasterWeights,
    PackingMode,
    PeftMethod,
)
from tunebook.config.plain import plain_config
from tunebook.config.schema import (
    ActivationConfig,
    AttentionConfig,
    DatasetConfig,
    EvaluationConfig,
    HardwareConfig,
    ModelConfig,
    PackingConfig,
    PeftSettings,
    PrecisionConfig,
    RunConfig,
)
from tunebook.errors import RequestError
from tunebook.evaluate.target import Target
from tunebook.facts.generations import GENERATIONS
from tunebook.hardware.detect import detect_machine
from tunebook.model.adapters import ADAPTER_FILE, is_adapter
from tunebook.model.base_config import read_dtype
from tunebook.model.hub import fetch_config
from tunebook.model.tokenizer_files import has_vocabulary

EVALUATIONS = "evaluations"  # the folder in outputs/ with the results of models that belong to no run
MODEL_FILE = "model.yaml"  # stands in the place of run.yaml there


def model_config(target: Target) -> ModelConfig:
    """A model that no run configures; an adapter's is its base, with the tokenizer beside the adapter if it has one.

    Its template writes the date that it wrote in the training. Raises: RequestError for an adapter whose base is not
    known or not here.
    """
    model = _named_model(target)
    date = target.origin.template_date if target.origin else None
    return model if date is None else replace(model, template_date=date)


def _named_model(target: Target) -> ModelConfig:
    if target.folder is None:
        return ModelConfig(name=target.hub_name)
    if not is_adapter(target.folder):
        return ModelConfig(path=str(target.folder))
    file = target.folder / ADAPTER_FILE
    try:
        base = str(json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"])
    except (ValueError, KeyError, TypeError) as error:
        raise RequestError(
            f"{file} does not say which base model the adapter belongs to; copy it again, or add "
            "base_model_name_or_path",
            problem_id="adapter-without-base",
        ) from error
    tokenizer = str(target.folder) if has_vocabulary(target.folder) else None
    if Path(base).is_dir():
        return ModelConfig(path=base, tokenizer=tokenizer)
    if base.startswith(("/", ".", "~")) or base.count("/") > 1:
        raise RequestError(
            f"the adapter's base model, {base}, is not on this machine; copy it here and correct "
            f"base_model_name_or_path in {file}",
            problem_id="adapter-without-base",
        )
    return ModelConfig(name=base, tokenizer=tokenizer)


def bare_config(target: Target, evaluation: EvaluationConfig) -> RunConfig:
    """What an evaluation of a bare model reads; the sections that only a training reads hold what changes nothing.

    Fetches the config.json of a model on the hub. The machine is asked for its GPUs without importing torch.
    Raises: RequestError for a model that is not here or not to be had.
    """
    model = model_config(target)
    if model.name is not None:
        fetch_config(model)
    gpus = detect_machine().gpus
    facts = GENERATIONS[gpus[0].generation if gpus else Generation.cpu]
    dtype = read_dtype(model) if gpus else None
    is_bf16 = dtype == "bfloat16" and facts.has_bf16
    origin = target.origin
    return config_of(
        model,
        is_bf16=is_bf16,
        # A CPU computes fp32 fastest; fp16 weights are kept in fp32 and their products computed in fp16.
        compute=Compute.fp16 if dtype == "float16" else Compute.fp32,
        hardware=HardwareConfig(
            generation=gpus[0].generation if gpus else Generation.cpu, gpus_per_node=max(1, len(gpus))
        ),
        evaluation=evaluation,
        system_prompt=origin.system_prompt if origin else None,
        recipe=origin.recipe if origin else None,
    )


def config_of(
    model: ModelConfig,
    *,
    is_bf16: bool,
    compute: Compute = Compute.fp32,
    hardware: HardwareConfig | None = None,
    evaluation: EvaluationConfig | None = None,
    system_prompt: str | None = None,
    recipe: str | None = None,
) -> RunConfig:
    """A configuration for loading a model in its weights' own format, with nothing in it to train."""
    return plain_config(
        recipe=recipe,
        model=model,
        dataset=DatasetConfig(system_prompt=system_prompt),
        hardware=hardware or HardwareConfig(),
        # Products are computed in the weights' format: fp32 asks for no conversion.
        precision=PrecisionConfig(
            compute=compute, master_weights=MasterWeights.bf16 if is_bf16 else MasterWeights.fp32
        ),
        attention=AttentionConfig(implementation=Attention.sdpa),
        packing=PackingConfig(mode=PackingMode.padded),
        activation=ActivationConfig(checkpointing=Checkpointing.disabled),
        peft=PeftSettings(method=PeftMethod.lora),
        evaluation=evaluation or EvaluationConfig(tasks=[]),
    )


def results_folder(target: Target, outputs: Path) -> Path:
    """Where the results of a bare model go: `outputs/evaluations/<name>`, a folder's with a hash of where it lies.

    Two folders of one name, such as the `model` of two copied runs, do not share it.
    """
    if target.folder is None:
        name = (target.hub_name or "").replace("/", "--")
    else:
        place = hashlib.sha256(str(target.folder.resolve()).encode()).hexdigest()[:8]
        name = f"{re.sub(r'[^A-Za-z0-9._-]', '-', target.folder.resolve().name)}-{place}"
    return outputs.expanduser().absolute() / EVALUATIONS / name


def without_overrides(error: RequestError, target: Target, command: str) -> RequestError:
    """The same error with what can be typed here: for a model without a run there are no overrides of keys.

    `command` is what a model's folder is typed behind, such as `tunebook chat `.
    """
    if error.problem_id == "hub-out-of-reach":
        return RequestError(
            f"there is no run or folder {target.name} here, and the hub is out of reach with no copy of it in the "
            f"cache. On a machine with network run `hf download {target.name} --local-dir DIR`, copy DIR here and "
            f"type: {command}DIR",
            problem_id="hub-out-of-reach",
        )
    if error.problem_id == "remote-code-refused":
        return RequestError(
            f"{target.name} brings Python code of its own, which is not run here; name a model of an "
            "architecture that transformers has, or a run that was trained with model.trust_remote_code=true",
            problem_id="remote-code-refused",
        )
    if target.hub_name is not None:
        return RequestError(
            f"there is no run or folder {target.name} here, and on the hub: {error.message}",
            problem_id=error.problem_id,
        )
    if "model." not in error.message:
        return error
    return RequestError(
        f"{error.message}. (No keys are set here: set it in the model's own folder, in tokenizer_config.json)",
        problem_id=error.problem_id,
    )
