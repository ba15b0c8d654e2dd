"""A subclass of TRL's `SFTTrainer` for our batches. It overrides only what has no hook upstream.

Overridden (a test pins the signatures): `get_train_dataloader` (our sampler decides every step's documents),
`evaluate` (validation loss weighted by tokens; upstream averages over batches of different sizes),
`compute_loss` and `log` (upstream waits for every GPU after each forward pass, for three logged numbers; trackers and
checkpoints get the numbers of metrics.jsonl),
`compute_loss_context_manager` (accelerate runs FSDP2 without autocast), `_save_checkpoint`, `_get_output_dir`,
`_push_from_checkpoint` and `_load_best_model` (checkpoints are complete or absent, and verified before a load),
`_save` (an adapter's generation settings), `_determine_best_metric` (only saved steps are ranked), `create_scheduler`
and `_load_optimizer_and_scheduler` (run.yaml's hyperparameters apply after a resume), `_run_epoch` (a resumed run may
be complete already), `_issue_warnings_after_load` (weights that were not loaded are an error), `create_model_card`
(upstream's does not know the run, and takes the checkpoints' folder for a model).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.modeling import is_peft_model
from peft.utils.other import TrainableTokensWrapper
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.data import DataLoader
from transformers.trainer import TRAINER_STATE_NAME
from trl import SFTTrainer
from trl.models.activation_offloading import OffloadActivations

from tunebook.checkpoint.choose import require_verified
from tunebook.checkpoint.collectives import on_first_rank
from tunebook.checkpoint.record import FileEntry, checkpoint_path, read_record, step_of
from tunebook.checkpoint.resharding import needs_universal, write_universal
from tunebook.checkpoint.retention import estimate_bytes
from tunebook.checkpoint.save import CheckpointSaver, publish_folder, seal_files
from tunebook.data.sampler import DocumentRows, RankBatches
from tunebook.errors import InvalidTrainingError, RequestError, TunebookError
from tunebook.model.blocks import name_experts
from tunebook.train.callbacks import Records, StopOnRequest, loss_not_finite
from tunebook.train.offloading import gather_head, keep_scale_on_host, keep_weights
from tunebook.train.one_pass_head import one_pass_head
from tunebook.train.restoring import Hyperparameters, apply_hyperparameters, hyperparameters, load_stored_weights
from tunebook.train.sequence import SequenceGroup


class TokenTotals:
    """Sums over the micro-batches of this rank since the last log, on its device.

    Reading a number from a GPU waits for all its queued work, and gathering one waits for the slowest rank. Upstream
    does both several times after every forward pass, and the GPU idles meanwhile.
    """

    def __init__(self) -> None:
        # (5,) in float64: trained tokens, entropy, correct guesses, routers' losses, micro-batches with one
        self._sums: torch.Tensor | None = None

    def add(self, outputs: Any, router_loss: torch.Tensor | None = None) -> None:
        """Add the outputs of TRL's fused head for a micro-batch, (batch, tokens), zero for untrained tokens."""
        judged = outputs.label_mask.sum()
        routed = [judged.new_zeros(())] * 2 if router_loss is None else [router_loss.detach(), judged > 0]
        sums = [judged, outputs.entropy.detach().sum(), outputs.is_top1.sum(), *routed]
        found = torch.stack([one.double() for one in sums])
        self._sums = found if self._sums is None else self._sums + found

    def take(self, over_ranks: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Mean entropy and accuracy per trained token, by TRL's names; then reset.

        With the mean of the routers' losses if there are any. A collective. Empty if no rank has counted anything.
        """
        if self._sums is None:
            return {}
        judged, entropy, right, routers, num_routed = over_ranks(self._sums).tolist()
        self._sums = None
        means = {"entropy": entropy / max(judged, 1.0), "mean_token_accuracy": right / max(judged, 1.0)}
        if num_routed:
            means["aux_loss"] = routers / num_routed
        return means


class RecipeTrainer(SFTTrainer):
    """`SFTTrainer` over prepared documents.

    `train_batches` and `validation_batches` are this rank's micro-batches; the data sets handed to the base class are
    the prepared documents themselves.
    """

    def __init__(
        self,
        *args: Any,
        filler_token_id: int,
        train_batches: RankBatches,
        validation_batches: RankBatches | None = None,
        autocast_dtype: torch.dtype | None = None,
        row_multiple: int | None = None,
        has_one_pass_head: bool = False,
        sequence: SequenceGroup | None = None,
        saver: CheckpointSaver,
        **kwargs: Any,
    ) -> None:
        self.filler_token_id = filler_token_id  # of rows without a document, excluded from the loss
        self.train_batches = train_batches
        self.validation_batches = validation_batches
        self.autocast_dtype = autocast_dtype  # if the base class would run without autocast
        self.row_multiple = row_multiple  # in tokens
        self.has_one_pass_head = has_one_pass_head  # see `one_pass_head`
        self.sequence = sequence  # the ranks that share this rank's rows
        self.saver = saver
        self.best_step: int | None = None  # step of the best checkpoint, once it is loaded at the end
        self.stopping: StopOnRequest | None = None
        self.records: Records | None = None
        self._written: Hyperparameters = []  # run.yaml's, before a checkpoint is loaded
        self._loaded_from: Path | None = None
        self._totals = TokenTotals()
        self._is_saving = False
        self._is_universal = False  # True if the loaded checkpoint is from another number of ranks
        super().__init__(*args, **kwargs)
        # The loss below is divided by the trained tokens of the whole step for every model. Gemma 3n's and 4's own loss
        # is not, so upstream would give each micro-batch the same weight.
        self.model_accepts_loss_kwargs = True
        trained: Any = self.model
        text = trained.config.get_text_config()
        if self.aux_loss_enabled and not name_experts(text):
            # TRL enables it for dense models of an architecture that may have experts.
            self.aux_loss_enabled = text.output_router_logits = False
        head = trained.get_output_embeddings()
        if isinstance(head, TrainableTokensWrapper):  # TRL 1.16 reads the head's bias, which PEFT 0.21's wrapper lacks
            head.register_parameter("bias", None)
            # Of a vocabulary that has grown, PEFT would write both matrices with each adapter.
            trained.save_pretrained = partial(trained.save_pretrained, save_embedding_layers=False)
        if sequence is not None:
            if self.aux_loss_enabled:
                raise RequestError(
                    f"parallelism.sequence_group_size={sequence.size}: the loss that balances the model's experts "
                    "would be that of a part of a row; try parallelism.sequence_group_size=1",
                    problem_id="sequence-group-model",
                )
            self.data_collator = sequence.collator(self.data_collator)
        if self.is_fsdp_enabled and isinstance(self.accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy):
            gather_head(self.model)
            keep_scale_on_host(self.accelerator)
        offloading, state = self.maybe_activation_offload_context, self.accelerator.state
        # ZeRO-3 has its own linear product, which keeps no view of a weight.
        is_zero3 = self.is_deepspeed_enabled and state.deepspeed_plugin.zero_stage == 3
        if isinstance(offloading, OffloadActivations) and not is_zero3:
            keep_weights(offloading)
        if self.args.push_to_hub:
            saver.when_complete = self._upload

    def _loader(self, documents: Any, batches: RankBatches) -> DataLoader[Any]:
        multiple = self.row_multiple if self.padding_free else None  # the collator fills padded rows
        rows = DocumentRows(documents, filler_token_id=self.filler_token_id, multiple=multiple or 1)
        return DataLoader(
            rows,  # type: ignore[arg-type]
            batch_sampler=batches,
            collate_fn=self.data_collator,
            pin_memory=torch.cuda.is_available(),
        )

    def get_train_dataloader(self) -> DataLoader[Any]:
        """This rank's share of every step. It is not prepared by accelerate, which would split it again."""
        return self._loader(self.train_dataset, self.train_batches)

    def compute_loss_context_manager(self) -> ExitStack:
        """The forward pass under autocast, if configured. Casts are not cached: gathered weights are bf16 already."""
        contexts = super().compute_loss_context_manager()
        if self.autocast_dtype is not None:
            device = self.args.device.type
            contexts.enter_context(torch.autocast(device, dtype=self.autocast_dtype, cache_enabled=False))
        return contexts

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Upstream's loss: the sum over this micro-batch, per trained token of the whole step over all ranks.

        DDP, FSDP and ZeRO average gradients over the ranks, so the loss is multiplied by their number. A mixture of
        experts adds its routers' loss, as upstream: the mean over the tokens of a micro-batch, then over micro-batches
        and ranks. A row without a document has none. Raises: InvalidTrainingError if the number of the step's trained
        tokens is unknown: each micro-batch would have the same weight, however few tokens it trains on.
        """
        if num_items_in_batch is None and model.training:
            raise InvalidTrainingError(
                "the number of trained tokens of this step is unknown, so its micro-batches cannot be weighted by "
                "theirs: the gradient would depend on the split of the step. This is a bug in Tunebook, or the "
                "installed version of transformers is not the lock's",
                problem_id="tokens-not-counted",
            )
        with one_pass_head() if self.has_one_pass_head else nullcontext():
            if return_outputs:
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[no-untyped-call]
            inputs["use_cache"] = False
            if self.aux_loss_enabled:
                inputs["output_router_logits"] = True
            outputs = model(**inputs, fused_lm_head=True)
        num_items = torch.as_tensor(num_items_in_batch).clamp(min=1)
        loss = -outputs.log_probs.sum() / num_items * self.accelerator.num_processes
        router_loss = None
        if self.aux_loss_enabled:
            router_loss = outputs.aux_loss * outputs.label_mask.any()
            loss = loss + self.router_aux_loss_coef * router_loss / self.current_gradient_accumulation_steps
        self._totals.add(outputs, router_loss)
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As upstream, with the totals since the last log and the numbers of metrics.jsonl. Called on every rank."""
        model: Any = self.model
        if model.training:
            self._metrics["train"] |= {name: [value] for name, value in self._totals.take(self._summed).items()}
        logs.pop("train_samples_per_second", None)  # the summary at the end counts rows, not documents
        if self.records is not None:
            self.records.complete(logs, self.args, self.state)
        super().log(logs, start_time)

    def _summed(self, values: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = self.accelerator.reduce(values, reduction="sum")
        return summed

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The mean validation loss per trained token over all ranks, as `eval_validation_loss`."""
        assert self.validation_batches is not None
        totals = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        model: Any = self.model
        model.eval()
        with torch.no_grad():
            for batch in self._loader(self.eval_dataset, self.validation_batches):
                inputs = self._prepare_inputs(batch)
                with self.compute_loss_context_manager():
                    outputs = self.model_wrapped(**inputs, use_cache=False, fused_lm_head=True)
                totals += torch.stack([-outputs.log_probs.sum(), outputs.label_mask.sum()]).double()
        negative_log_likelihood, num_tokens = self.accelerator.reduce(totals, reduction="sum").tolist()
        metrics = {
            f"{metric_key_prefix}_validation_loss": negative_log_likelihood / num_tokens,
            f"{metric_key_prefix}_validation_tokens": num_tokens,
        }
        self.log(dict(metrics))
        model.train()
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def require_finite_loss(self) -> None:
        """Raises: InvalidTrainingError on every rank if any rank's loss since the last log is not finite."""
        is_finite = torch.isfinite(self._tr_loss).float().reshape(1)
        if self.accelerator.reduce(is_finite, reduction="sum").item() < self.accelerator.num_processes:
            raise loss_not_finite(self.state.global_step)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a complete checkpoint or none, and never weights after a non-finite loss.

        The saver completes it, in the background if configured.
        """
        self.require_finite_loss()
        step = self.state.global_step
        try:
            self.saver.begin(step, estimate_bytes(self.model))
            self._is_saving = True
            super()._save_checkpoint(model, trial)  # type: ignore[no-untyped-call]
            self._name_best(step)
        except BaseException:
            self.saver.abandon(step)
            raise
        finally:
            self._is_saving = False
        self.saver.finish(step, self.state.best_global_step)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """As upstream. An adapter gets generation settings, too: the base's may not end answers where training does."""
        super()._save(output_dir, state_dict)
        if is_peft_model(self.model):
            model: Any = self.model
            model.generation_config.save_pretrained(output_dir or self.args.output_dir)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """As upstream, but only for saved steps: others cannot be loaded at the end."""
        return self.control.should_save and super()._determine_best_metric(metrics, trial)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """As upstream, but without a step if a callback ended the training at its begin."""
        if not self.control.should_training_stop:
            super()._run_epoch(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _get_output_dir(self, trial: Any) -> str:
        """The folder for upstream's checkpoints: a hidden one while a checkpoint is written."""
        if self._is_saving:
            return str(self.saver.unfinished)
        folder: str = super()._get_output_dir(trial)
        return folder

    def _name_best(self, step: int) -> None:
        """Set the final path of the best checkpoint: upstream has the hidden folder's, or that of a moved run."""
        best = self.state.best_global_step
        if best is None or not (best == step or self.saver.has(best)):
            return  # there is none, or it is in the folder of the run that this one resumed from
        self.state.best_model_checkpoint = str(checkpoint_path(self.saver.folder, best))
        if self.args.should_save:
            self.state.save_to_json(str(checkpoint_path(self.saver.unfinished, step) / TRAINER_STATE_NAME))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Nothing while it is being written: see `_upload`."""

    def create_model_card(  # type: ignore[override]  # as TRL's
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Nothing: `tunebook export` writes a card from the run's records."""

    def _upload(self, checkpoint: Path) -> None:
        """Upload a complete checkpoint under its own step; upstream would use the present step of the training."""
        now = self.state.global_step
        self.state.global_step = step_of(checkpoint) or now
        try:
            super()._push_from_checkpoint(str(checkpoint))
        finally:
            self.state.global_step = now

    def loadable(self, checkpoint: Path) -> Path:
        """The folder to load a checkpoint from: a converted one if ZeRO's number of ranks has changed. A collective."""
        record = on_first_rank(lambda: read_record(checkpoint))
        self._is_universal = needs_universal(record.identity, self.saver.identity)
        if self.is_deepspeed_enabled:
            self.accelerator.state.deepspeed_plugin.deepspeed_config["checkpoint"] = {
                "load_universal": self._is_universal
            }
            if self.deepspeed is not None:  # the engine exists and has read that setting
                self.deepspeed._config.load_universal_checkpoint = self._is_universal
        self._loaded_from = checkpoint
        if self._is_universal:
            self._loaded_from = on_first_rank(lambda: write_universal(checkpoint, self.saver.unfinished))
        return self._loaded_from

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """As upstream. The optimizer is complete now, and no checkpoint is loaded yet."""
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        self._written = hyperparameters(self.optimizer)
        return scheduler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """As upstream, then run.yaml's hyperparameters, which the checkpoint's would silently replace.

        Universal checkpoints of DeepSpeed 0.19 restore one step tensor that all groups of ZeRO-3 share, so that every
        group's update increments it. It is on the CPU, where a fused update on a GPU does not accept it.
        """
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        apply_hyperparameters(self._written, self.optimizer, self.lr_scheduler)
        engine: Any = self.deepspeed
        if engine is None:
            return
        if hasattr(engine.optimizer, "clip_grad"):
            engine.optimizer.clip_grad = engine.gradient_clipping()  # ZeRO-1 and 2 restore it from the checkpoint, too
        if self._is_universal:
            for parameter, state in engine.optimizer.optimizer.state.items():
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"] = state["step"].to(parameter.device, copy=True)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Load the weights that upstream did not find by name; it only warns about them."""
        assert self._loaded_from is not None
        load_stored_weights(self.model, self._loaded_from, load_result)

    def _load_best_model(self) -> None:
        """As upstream, after every rank has verified the checkpoint; not before a requeue."""
        if self.stopping is not None and self.stopping.is_stopping:
            return
        self.saver.settle()
        best = Path(str(self.state.best_model_checkpoint))
        require_verified(best)
        self.state.best_model_checkpoint = str(self.loadable(best))
        super()._load_best_model()
        self.state.best_model_checkpoint = str(best)
        self.best_step = step_of(best)

    def save_final_model(self, folder: Path) -> dict[str, FileEntry]:
        """Write the trained model, gathered from all ranks, as one complete Hugging Face folder or none.

        Its files are flushed to disk before it gets its name; returns their sizes and hashes. FSDP's checkpoints are
        sharded by default, and upstream would silently write no whole model. Raises: TunebookError if no weights were
        written.
        """
        unfinished = folder.with_name(f".{folder.name}.unfinished")
        if self.is_world_process_zero():
            for left in (unfinished, *folder.parent.glob(f".{folder.name}.replaced-*")):
                shutil.rmtree(left, ignore_errors=True)
        if self.is_fsdp_enabled:
            self.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        try:
            self.save_model(str(unfinished))
            on_first_rank(lambda: _require_weights(unfinished, folder))
            files = seal_files(unfinished)
            on_first_rank(lambda: publish_folder(unfinished, folder))
        except BaseException:
            if self.is_world_process_zero():
                shutil.rmtree(unfinished, ignore_errors=True)
            raise
        return files


def _require_weights(unfinished: Path, folder: Path) -> None:
    if not any(unfinished.glob("*.safetensors")):
        raise TunebookError(
            f"the training is done, but no weights were written to {folder}; the newest folder in "
            f"{folder.parent / 'checkpoints'} holds them, if checkpoints were asked for",
            problem_id="model-not-written",
        )
