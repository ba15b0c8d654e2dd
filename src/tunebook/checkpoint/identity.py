"""The run that a checkpoint belongs to, and whether another run may resume from it.

Some differences make a checkpoint impossible to load. Others change the result: they are refused unless
`training.resume_anyway` names them. Settings that do neither, such as the saving interval, are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunebook.checkpoint.record import CheckpointRecord, Identity
from tunebook.config.choices import Offload, PeftMethod, ResumeAnyway, Strategy
from tunebook.config.identity import changed_settings, config_hash, default_of, result_settings
from tunebook.config.override_text import as_typed
from tunebook.config.schema import RunConfig, world_size
from tunebook.data.prepared import Prepared
from tunebook.errors import RequestError, first_few
from tunebook.parallel.deepspeed import zero_stage
from tunebook.parallel.fsdp import is_fsdp
from tunebook.record.manifest import describe_model

# Keys that change no weight of a resumed run, or that are compared in another way:
_NOT_COMPARED = (
    "recipe",
    "evaluation",
    "training.save_every_steps",
    "training.keep_checkpoints",
    "training.log_every_steps",
    "hardware",  # the number of ranks is
    "parallelism.strategy",
    "peft.method",
    "dataset",  # the hash of the tokens is
    "model.path",  # its config.json is
    "model.name",
    "model.revision",
    "model.facts",
    "model.weights",  # only their origin before the first step
)
# Keys that decide which tensors an adapter has.
_OF_ADAPTERS = (
    *("peft.rank", "peft.rank_pattern", "peft.target_modules", "peft.target_parameters"),
    *("peft.modules_to_save", "peft.use_dora"),
)
_NUM_KEYS_NAMED = 6


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One difference between a run and a checkpoint, and the value of `training.resume_anyway` that allows it."""

    text: str
    allowed_by: ResumeAnyway | None  # None: it cannot be loaded


def identity_of(config: RunConfig, prepared: Prepared, fingerprint: str | None) -> Identity:
    """The identity of a resolved run on prepared data, for its checkpoints.

    `fingerprint` is `weights_fingerprint` of its model; computing it reads the weights, so one rank should.
    """
    return Identity(
        strategy=config.parallelism.strategy.name,
        peft=config.peft.method.name,
        world_size=world_size(config),
        model=describe_model(config.model, fingerprint),
        config_sha256=config_hash(config),
        settings=result_settings(config),
        data_sha256=prepared.content_sha256,
        tokenizer_sha256=prepared.tokenizer_sha256,
        chat_template_sha256=prepared.chat_template_sha256,
    )


def require_same(checkpoint: Path, record: CheckpointRecord, identity: Identity, anyway: list[ResumeAnyway]) -> None:
    """Refuse a checkpoint that a run cannot resume from, or only with another result. Raises: RequestError."""
    differing = list(differences(record.identity, identity))
    if impossible := [difference for difference in differing if difference.allowed_by is None]:
        export = "tunebook export" if record.identity.peft == PeftMethod.full.name else "tunebook export --merge"
        raise RequestError(
            f"{checkpoint} cannot be resumed from: {'; '.join(difference.text for difference in impossible)}. Resume "
            f"with what it was saved with, or start from its weights, with a new optimizer: {export}, then "
            "model=THAT_FOLDER; to start again: training.resume=never",
            problem_id="checkpoint-of-another-run",
        )
    if refused := [difference for difference in differing if difference.allowed_by not in anyway]:
        names = [name.name for name in ResumeAnyway if any(other.allowed_by is name for other in differing)]
        raise RequestError(
            f"{checkpoint} is not of this run: {'; '.join(difference.text for difference in refused)}. Resuming "
            "from it would give another result than either run. To do so anyway: "
            f"'training.resume_anyway=[{','.join(names)}]'; to start again: training.resume=never",
            problem_id="checkpoint-differs",
        )


def differences(saved: Identity, current: Identity) -> Iterator[Difference]:
    """Every way in which a checkpoint's identity differs from a run's."""
    then, now = _needed_to_load(saved), _needed_to_load(current)
    for key, value in then.items():
        if key in now and now[key] != value:
            yield Difference(text=_change(key, value, now[key]), allowed_by=None)
    if saved.data_sha256 != current.data_sha256:
        text = f"its data have the hash {saved.data_sha256[:12]}..., not {current.data_sha256[:12]}..."
        yield Difference(text=text, allowed_by=ResumeAnyway.data)
    if saved.chat_template_sha256 != current.chat_template_sha256:
        yield Difference(text="its chat template is another", allowed_by=ResumeAnyway.template)
    if saved.tokenizer_sha256 != current.tokenizer_sha256:
        yield Difference(text="its tokenizer is another", allowed_by=ResumeAnyway.data)
    if saved.world_size != current.world_size:
        text = _change("the number of ranks", saved.world_size, current.world_size)
        # State on NVMe disks is saved as each rank's files.
        is_fixed = saved.settings.get("parallelism", {}).get("offload_optimizer") == Offload.nvme.name
        yield Difference(text=text, allowed_by=None if is_fixed else ResumeAnyway.world_size)
    if keys := sorted(_changed_keys(saved.settings, current.settings)):
        yield Difference(text=first_few(keys, _NUM_KEYS_NAMED), allowed_by=ResumeAnyway.config)


def _needed_to_load(identity: Identity) -> dict[str, Any]:
    """What must be the same to load a checkpoint: the model, which tensors there are, and how they lie on the disk."""
    strategy, model = Strategy[identity.strategy], identity.model
    # A model on the hub has a name; one in a folder, which may have moved, has its config.json.
    of_folder, on_hub = model["config_sha256"], f"{model['name']}@{model['revision']}"
    name = f"that with the config.json {of_folder[:12]}..." if of_folder is not None else on_hub
    needed: dict[str, Any] = {"the model": name, "peft": identity.peft, "parallelism": "single or ddp"}
    keys = ["optimizer.name"]
    if zero_stage(strategy) is not None:  # whose parameters may be assigned to the ranks one by one, in another order
        needed["parallelism"] = strategy.name
        is_round_robin = bool(identity.settings.get("parallelism", {}).get("round_robin_gradients"))
        needed["parallelism.round_robin_gradients"] = is_round_robin
    elif is_fsdp(strategy):
        needed["parallelism"] = "fsdp"
    if identity.peft != PeftMethod.full.name:
        keys += _OF_ADAPTERS
        if (fingerprint := model["weights_fingerprint"]) is not None:
            needed["the fingerprint of the base's weights"] = f"{fingerprint[:12]}..."
    for key in keys:
        section, _, last = key.partition(".")
        needed[key] = identity.settings.get(section, {}).get(last, default_of(key))
    return needed


def _change(key: str, before: Any, now: Any) -> str:
    return f"{key} was {as_typed(before)} and is {as_typed(now)}"


def _changed_keys(saved: dict[str, Any], current: dict[str, Any]) -> Iterator[str]:
    """Each key whose value differs, with both values."""
    for key, before, now in changed_settings(saved, current):
        if not any(
            key == skipped or key.startswith(f"{skipped}.")
            for skipped in (*_NOT_COMPARED, "optimizer.name", *_OF_ADAPTERS)
        ):
            yield _change(key, before, now)
