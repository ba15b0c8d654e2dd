"""The run that a checkpoint belongs to, and whether another run may resume from it.

Some differences make a checkpoint impossible to load. Others change the result: they are refused unless
`training.resume_anyway` names them. Settings that do neither, such as the saving interval, are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunebook.checkpoint.record import CheckpointRecord, Identity
from tunebook.config.choices import Offload, PeftMethod, ResumeAnyway, Strategy
from tunebook.config.identity import changed_settings, config_hash, default_of, result_settings
from tunebook.config.override_text import as_typed, typed, typed_list, typed_mapping
from tunebook.config.schema import RunConfig, world_size
from tunebook.data.prepared import Prepared
from tunebook.errors import RequestError, first_few
from tunebook.model.weights_fingerprint import recorded_in
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
# Keys that decide which tensors a checkpoint's optimizer and adapter have.
_OF_ADAPTERS = (
    *("peft.rank", "peft.rank_pattern", "peft.target_modules", "peft.target_parameters"),
    *("peft.modules_to_save", "peft.use_dora"),
)
_DECIDE_TENSORS = ("optimizer.name", *_OF_ADAPTERS)
_NUM_KEYS_NAMED = 6


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One difference between a run and a checkpoint, and the value of `training.resume_anyway` that allows it."""

    text: str
    allowed_by: ResumeAnyway | None  # None: it cannot be loaded
    fix: str = ""  # what to do if it cannot be loaded


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


def require_same(checkpoint: Path, record: CheckpointRecord, own: Identity, anyway: list[ResumeAnyway]) -> None:
    """Refuse a checkpoint that a run cannot resume from, or only with another result. Raises: RequestError."""
    found = list(differences(record.identity, own))
    if impossible := [difference for difference in found if difference.allowed_by is None]:
        raise RequestError(
            f"{checkpoint} cannot be resumed from: {'; '.join(difference.text for difference in impossible)}. "
            f"{impossible[0].fix}",
            problem_id="checkpoint-of-another-run",
        )
    refused = [difference for difference in found if difference.allowed_by not in anyway]
    if refused:
        names = [name.name for name in ResumeAnyway if any(other.allowed_by is name for other in found)]
        raise RequestError(
            f"{checkpoint} is not of this run: {'; '.join(difference.text for difference in refused)}. Resuming "
            "from it would give another result than either run. To do so anyway: "
            f"'training.resume_anyway=[{','.join(names)}]'; to start again: training.resume=never",
            problem_id="checkpoint-differs",
        )


def differences(theirs: Identity, own: Identity) -> Iterator[Difference]:
    """Every way in which a checkpoint's identity differs from a run's."""
    yield from _cannot_load(theirs, own)
    if theirs.data_sha256 != own.data_sha256:
        text = f"its data have the hash {theirs.data_sha256[:12]}..., not {own.data_sha256[:12]}..."
        yield Difference(text=text, allowed_by=ResumeAnyway.data)
    if theirs.chat_template_sha256 != own.chat_template_sha256:
        yield Difference(text="its chat template is another", allowed_by=ResumeAnyway.template)
    if theirs.tokenizer_sha256 != own.tokenizer_sha256:
        yield Difference(text="its tokenizer is another", allowed_by=ResumeAnyway.data)
    if theirs.world_size != own.world_size and _layout(theirs) == _layout(own) and not _why_rigid(theirs):
        text = f"it was saved by {_ranks(theirs.world_size)} and this run has {_ranks(own.world_size)}"
        yield Difference(text=text, allowed_by=ResumeAnyway.world_size)
    if keys := sorted(_changed_keys(theirs.settings, own.settings)):
        yield Difference(text=first_few(keys, _NUM_KEYS_NAMED), allowed_by=ResumeAnyway.config)


def has_same_data(theirs: Identity, own: Identity) -> bool:
    """Whether two runs train and validate on the same tokens, so that their validation losses can be compared."""
    return theirs.data_sha256 == own.data_sha256


def resumed_identity(theirs: Identity, own: Identity) -> Identity:
    """The identity of the further checkpoints of a run that resumes from a checkpoint.

    A checkpoint of a whole model has all weights, so its base stays the recorded one, whatever is in the base's folder
    now.
    """
    if own.peft != PeftMethod.full.name:
        return own
    return replace(own, model=own.model | {"weights_fingerprint": recorded_in(theirs.model)})


def _layout(identity: Identity) -> tuple[str, str | None]:
    """The layout of a checkpoint on disk: what saved it, and the setting that decides it as it is typed.

    A checkpoint of another layout cannot be loaded.
    """
    strategy, settings = Strategy[identity.strategy], identity.settings.get("parallelism", {})
    if zero_stage(strategy) is not None:  # whose parameters may be assigned to the ranks one by one, in another order
        is_dealt_out = bool(settings.get("round_robin_gradients"))
        return strategy.name, f"parallelism.round_robin_gradients={as_typed(is_dealt_out)}"
    if is_fsdp(strategy):
        return "fsdp", f"parallelism.state_dict={settings['state_dict']}"
    return "whole", None


def _cannot_load(theirs: Identity, own: Identity) -> Iterator[Difference]:
    from_weights = "To start from its weights, with a new optimizer: tunebook export, then model.path=THAT_FOLDER"
    if (name := _model_name(theirs)) != _model_name(own):
        text = f"it is of the model {name}, and this run trains {_model_name(own)}"
        yield Difference(text=text, allowed_by=None, fix="Name a checkpoint of this model")
    elif _has_other_base(theirs, own):
        yield _other_base(theirs, own)
    if theirs.peft != own.peft:
        text = f"it was trained with peft={theirs.peft}, and this run with peft={own.peft}"
        yield Difference(text=text, allowed_by=None, fix=f"Resume with peft={theirs.peft}. {from_weights}")
    for key, then, now in _other_tensors(theirs, own):
        if isinstance(then, dict):
            fix = typed_mapping(key, then)
        else:
            fix = typed_list(key, then) if isinstance(then, list) else typed(key, as_typed(then))
        yield Difference(text=_change(key, then, now), allowed_by=None, fix=f"Resume with {fix}. {from_weights}")
    (kind, setting), (own_kind, own_setting) = _layout(theirs), _layout(own)
    if (kind, setting) != (own_kind, own_setting):
        then, now = setting, own_setting
        if kind != own_kind:
            then, now = f"parallelism={theirs.strategy}", f"parallelism={own.strategy}"
        fix = " ".join(dict.fromkeys(filter(None, (then, setting))))
        text = f"it was saved with {then}, and this run has {now}"
        yield Difference(text=text, allowed_by=None, fix=f"Resume with {fix}. {from_weights}")
    elif theirs.world_size != own.world_size and (why := _why_rigid(theirs)):
        text = f"it holds the shards of {_ranks(theirs.world_size)}, and this run has {_ranks(own.world_size)}; {why}"
        yield Difference(text=text, allowed_by=None, fix=f"Resume with {_ranks(theirs.world_size)}. {from_weights}")


def _other_tensors(theirs: Identity, own: Identity) -> Iterator[tuple[str, Any, Any]]:
    """The keys of `_DECIDE_TENSORS` with another value than a checkpoint's, and both values."""
    keys = _DECIDE_TENSORS if own.peft != PeftMethod.full.name else ("optimizer.name",)
    for key in keys:
        section, _, name = key.partition(".")
        before, here = (side.settings.get(section, {}).get(name, default_of(key)) for side in (theirs, own))
        if before != here:
            yield key, before, here


def _change(key: str, before: Any, now: Any) -> str:
    return f"{key} was {as_typed(before)} and is {as_typed(now)}"


def _has_other_base(theirs: Identity, own: Identity) -> bool:
    """Whether an adapter would resume on other base weights than before; older checkpoints do not record them."""
    is_adapter = PeftMethod.full.name not in (theirs.peft, own.peft)
    then = recorded_in(theirs.model)
    return is_adapter and then is not None and recorded_in(own.model) != then


def _other_base(theirs: Identity, own: Identity) -> Difference:
    then, now = (str(recorded_in(identity.model))[:12] for identity in (theirs, own))
    return Difference(
        text=f"its adapter was trained on weights with the fingerprint {then}..., and those of {own.model['name']} "
        f"have {now}... now",
        allowed_by=None,
        fix="Put the weights back that the run started from; to start again on these: training.resume=never",
    )


def _why_rigid(identity: Identity) -> str | None:
    """Why DeepSpeed cannot reshard a ZeRO checkpoint for another number of ranks; None if it can, or need not."""
    if identity.settings.get("parallelism", {}).get("offload_optimizer") == Offload.nvme.name:
        return "state on NVMe disks is saved as each rank's files"
    return None


def _model_name(identity: Identity) -> str:
    """A model's name on the hub; for a folder, which may have moved, the hash of its config.json."""
    model = identity.model
    if model["config_sha256"] is not None:
        return f"with the config.json {model['config_sha256'][:12]}..."
    return f"{model['name']}@{model['revision']}" if model["revision"] else str(model["name"])


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count != 1 else ''}"


def _changed_keys(theirs: dict[str, Any], own: dict[str, Any]) -> Iterator[str]:
    """Each key whose value differs, with both values."""
    for key, before, now in changed_settings(theirs, own):
        if not any(key == skipped or key.startswith(f"{skipped}.") for skipped in (*_NOT_COMPARED, *_DECIDE_TENSORS)):
            yield _change(key, before, now)
