"""Build a run's trainer: model, ranks, tokenizer, batches and checkpoints, in the order that they need each other."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PrinterCallback

from tunebook.checkpoint.collectives import background_group, on_first_rank
from tunebook.checkpoint.identity import identity_of
from tunebook.checkpoint.resharding import link_in_flat_order
from tunebook.checkpoint.save import CheckpointSaver
from tunebook.config.choices import Compute, Generation, PackingMode, PeftMethod
from tunebook.config.schema import RunConfig
from tunebook.data.batch import BatchPlan, row_length
from tunebook.data.prepared import Prepared, PreparedPart
from tunebook.data.sampler import RankBatches, Schedule, StepSize
from tunebook.facts.methods import method_facts
from tunebook.facts.strategies import strategy_facts
from tunebook.model.adapted_products import share_inputs
from tunebook.model.adapters import (
    adapter_config,
    freeze_parts,
    keep_in_fp32,
    require_known_layers,
    require_known_modules,
    require_known_parameters,
    see_without_gradients,
    trains_in_fp32,
)
from tunebook.model.blocks import compile_layers, text_blocks
from tunebook.model.four_bit import replace_four_bit
from tunebook.model.fp8 import convert_frozen_to_fp8, convert_to_fp8
from tunebook.model.linear_attention import isolate_documents
from tunebook.model.load import begin_loading, finish_loading, is_image_class
from tunebook.model.offloading import Copies, offload_activations
from tunebook.model.positions import position_by_document
from tunebook.model.tiled_mlp import tile_mlps
from tunebook.model.tokenizer import added_token_ids, agree_on_tokens, trainer_tokenizer
from tunebook.model.tokenizer_files import processor_files, tokenizer_folder
from tunebook.model.weight_files import weights_fingerprint
from tunebook.parallel.deepspeed import zero_stage
from tunebook.parallel.fsdp import autocast_dtype, is_fsdp, mixed_precision_policy
from tunebook.parallel.wrapped import unit_classes
from tunebook.record.start_up import StartClock
from tunebook.train.arguments import optimizer_factory, row_multiple, trainer_arguments
from tunebook.train.callbacks import StartRecord
from tunebook.train.leak_probe import LeakProbe
from tunebook.train.methods.trainer import MethodTrainer, Run
from tunebook.train.reporting import set_up_tracking
from tunebook.train.sequence import SequenceGroup, attend_over_group, join_sequence_group
from tunebook.train.spread import ParallelismCheck, bound_deepspeed_groups, join_ranks


def build_trainer(
    config: RunConfig, plan: BatchPlan, prepared: Prepared, schedule: Schedule, folder: Path, clock: StartClock
) -> MethodTrainer:
    """Load the model, join the ranks and put the trainer together, with the callbacks that check it."""
    assert plan.total_steps is not None
    validation = prepared.validation
    is_first_rank = os.environ.get("RANK", "0") == "0"
    set_up_tracking(config.tracking, folder, is_first_rank=is_first_rank)
    method: Any = import_module(method_facts(config).module)
    stated = trainer_arguments(config, plan, folder, has_validation=validation is not None)
    arguments, model, sequence = _load(config, partial(method.trainer_config, stated), clock)
    require_known_layers(config, model)
    tokenizer = trainer_tokenizer(config)
    rank, ranks = arguments.process_index // plan.sequence_group_size, plan.data_ranks
    units = unit_classes(config, model) if is_fsdp(config.parallelism.strategy) else []
    if units:  # the Trainer has no arguments for these two settings
        policy = mixed_precision_policy(config)
        arguments.fsdp_plugin_args |= {"transformer_cls_names_to_wrap": units, "mixed_precision_policy": policy}
    if zero_stage(config.parallelism.strategy) in (1, 2):
        link_in_flat_order()
    agree_on_tokens(model, tokenizer)
    batches = RankBatches(
        schedule, num_steps=plan.total_steps, micro_batch_size=plan.micro_batch_size, rank=rank, world_size=ranks
    )
    batches_of = partial(_every_document_once, config, plan, rank=rank, ranks=ranks)
    trainer: MethodTrainer = method.build(
        Run(config=config, prepared=prepared, sequence=sequence, batches_of=batches_of),
        model=model,
        args=arguments,
        processing_class=tokenizer,
        train_dataset=prepared.train.load(),
        eval_dataset=validation.load() if validation is not None else None,
        peft_config=adapter_config(config, model, added_token_ids(config.model, tokenizer)),
        optimizer_cls_and_kwargs=optimizer_factory(config),
        filler_token_id=tokenizer.eos_token_id,
        train_batches=batches,
        validation_batches=batches_of(validation) if validation else None,
        autocast_dtype=autocast_dtype(config),
        row_multiple=row_multiple(config),
        saver=_saver(config, folder, prepared),
    )
    trainer.keeps_gathered = strategy_facts(config).keeps_gathered
    # Also where the data is text alone. A tokenizer that only names the ids has no folder.
    if is_image_class(type(model).__name__) and tokenizer.name_or_path:
        trainer.processor_files = processor_files(tokenizer_folder(config.model))
    fp8_layers = _finish_layers(config, model, trainer)
    clock.passed("trainer")
    trainer.add_callback(StartRecord(clock, folder))
    trainer.add_callback(ParallelismCheck(config, trainer, folder, units, len(fp8_layers)))
    trainer.add_callback(LeakProbe(config, trainer, folder))  # after the check of the wrapped model
    for callback in trainer.callbacks_after_checks:
        trainer.add_callback(callback)
    trainer.remove_callback(PrinterCallback)  # the base class adds it in place of its progress bar
    return trainer


def _load(
    config: RunConfig, make_arguments: Callable[[], Any], clock: StartClock
) -> tuple[Any, PreTrainedModel, SequenceGroup | None]:
    """Load the model and join the ranks; returns the Trainer's arguments, the model and this rank's sequence group."""
    if config.model.compile_layers:
        from torch._inductor.async_compile import maybe_warm_pool  # an import that other runs do not need

        maybe_warm_pool()  # Inductor's processes take seconds to start: while the weights are loaded
    begun = begin_loading(config, rank=int(os.environ.get("RANK", "0")))
    clock.passed("model")
    join_ranks(config)
    arguments = make_arguments()
    bound_deepspeed_groups(config)
    clock.passed("join_ranks")
    model = finish_loading(config, begun, arguments.process_index, arguments.device)
    if config.peft.method is PeftMethod.full:
        freeze_parts(config, model)
    sequence = join_sequence_group(config)
    if sequence is not None:
        attend_over_group(config, sequence, model.config)
    clock.passed("weights")
    return arguments, model, sequence


def _finish_layers(config: RunConfig, model: PreTrainedModel, trainer: MethodTrainer) -> list[str]:
    """Convert and compile the layers once the trainer has changed the blocks (adapters, Liger); the layers in fp8."""
    is_on_cpu = config.hardware.generation is Generation.cpu
    see_without_gradients(config, model)
    if config.packing.mode is PackingMode.isolated or not is_on_cpu:  # a GPU's kernels are for padded rows, too
        isolate_documents(model, is_on_cpu=is_on_cpu)
        position_by_document(model)
    if config.activation.mlp_tile_tokens is not None:
        tile_mlps(model, config.activation.mlp_tile_tokens)
    fp8_layers = _convert_to_fp8(config, model) if config.precision.compute is Compute.fp8 else []
    if config.model.compile_layers:
        if config.peft.method is not PeftMethod.full:
            share_inputs(model)
            replace_four_bit(text_blocks(model).values())
        compile_layers(model, memory_budget=config.activation.memory_budget)
    if config.activation.offload:
        offload_activations(text_blocks(model).values(), Copies(trainer.args.device))
    require_known_modules(config, model)
    require_known_parameters(config, trainer.model)
    if trains_in_fp32(config):
        keep_in_fp32(trainer.model)
    return fp8_layers


def _convert_to_fp8(config: RunConfig, model: PreTrainedModel) -> list[str]:
    if config.peft.method is PeftMethod.full:
        return convert_to_fp8(model, config.precision.fp8_scaling)
    return convert_frozen_to_fp8(model)


def _saver(config: RunConfig, folder: Path, prepared: Prepared) -> CheckpointSaver:
    """The saver of the run's checkpoints. The ranks are joined already."""
    training = config.training
    return CheckpointSaver(
        folder,
        identity_of(config, prepared, on_first_rank(lambda: weights_fingerprint(config.model))),
        keep=training.keep_checkpoints,
        in_background=training.save_in_background,
        group=background_group(config.launcher.timeout_s) if training.save_in_background else None,
    )


def _every_document_once(
    config: RunConfig, plan: BatchPlan, part: PreparedPart, *, rank: int, ranks: int
) -> RankBatches:
    """Batches that contain every document of a part once, in stored order, in rows like those of training.

    `rank` and `ranks` count data ranks.
    """
    lengths = part.load_lengths().astype(np.int64)
    rows = ranks * plan.micro_batch_size
    is_packed = config.packing.mode is PackingMode.isolated
    length = row_length(config)
    size = StepSize(tokens=rows * length, row_length=length) if is_packed else StepSize(documents=rows)
    schedule = Schedule(lengths=lengths, size=size, rows_per_step=rows, is_packed=is_packed, seed=None)
    return RankBatches(
        schedule,
        num_steps=len(schedule.steps_of_epoch(0)),
        micro_batch_size=plan.micro_batch_size,
        rank=rank,
        world_size=ranks,
    )
