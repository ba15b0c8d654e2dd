"""GPUs per trial if several trials run at a time and the user sets no number: this machine's GPUs, divided evenly.

Without a number, a trial takes every GPU that it sees (`parallelism=auto`), and no two could run at a time. Such a
trial is planned with its share, and sees only that share when it trains (`sweep.shares`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

from tunebook.config.choices import Generation
from tunebook.hardware.detect import Machine
from tunebook.plan.auto.decisions import asked_keys
from tunebook.plan.draft import Draft, draft_composition, draft_run
from tunebook.sweep.options import SweepOptions
from tunebook.sweep.shares import uses_this_machine
from tunebook.sweep.trials import Trial

_SAY_HOW_MANY = ("hardware.gpus_per_node", "parallelism.strategy")


@dataclass(frozen=True, kw_only=True)
class Division:
    """The GPUs found here, and the number of trials that share them because they set no number of GPUs."""

    num_gpus: int
    num_at_once: int

    @property
    def gpus_per_trial(self) -> int:
        """GPUs of each trial; the remainder of an uneven division stays idle."""
        return self.num_gpus // self.num_at_once


@dataclass(kw_only=True)
class TrialDrafts:
    """Drafts of a sweep's trials, planned on this machine; each is composed and computed once."""

    recipe: str | None
    recipes_dirs: list[Path]
    machine: Machine
    _known: dict[tuple[tuple[str, ...], int], Draft] = field(default_factory=dict)

    def with_gpus(self, overrides: Collection[str], num_gpus: int) -> Draft:
        """Return the draft of a trial that sees the first `num_gpus` of the machine."""
        key = (tuple(overrides), num_gpus)
        if key not in self._known:
            whole = self.whole(overrides)
            share = num_gpus / len(self.machine.gpus)  # of the host memory, too: the other trials use theirs
            seen = replace(
                self.machine,
                gpus=self.machine.gpus[:num_gpus],
                host_memory_gib=share * self.machine.host_memory_gib,
            )
            self._known[key] = draft_composition(whole.composition, seen) if whole.composition else whole
        return self._known[key]

    def whole(self, overrides: Collection[str]) -> Draft:
        """Return the draft of a trial that sees all GPUs."""
        key = (tuple(overrides), len(self.machine.gpus))
        if key not in self._known:
            self._known[key] = draft_run(self.recipe, list(overrides), self.recipes_dirs, self.machine)
        return self._known[key]

    def divided(self, overrides: Collection[str], division: Division | None) -> Draft:
        """Return a trial's draft as it will run: on its share if it sets no number of GPUs, else on its own number."""
        draft = self.whole(overrides)
        if division is None or not _takes_all(draft, division.num_gpus):
            return draft
        return self.with_gpus(overrides, division.gpus_per_trial)


def divide(
    drafts: TrialDrafts, trials: list[Trial], options: SweepOptions, most_at_once: int | None
) -> Division | None:
    """Decide how many trials share the GPUs; None if there is nothing to divide.

    Use the requested number, but at most one trial per GPU: the rest wait. Without a requested number, use as many as
    fit into memory by estimate. `most_at_once` is the number of trials, if known.
    """
    num_gpus = len(drafts.machine.gpus)
    if options.launcher != "joblib" or num_gpus < 2:
        return None
    is_open = {trial.overrides: _takes_all(drafts.whole(trial.overrides), num_gpus) for trial in trials}
    if not any(is_open.values()):
        return None
    most = min(options.jobs or num_gpus, most_at_once or num_gpus, num_gpus)
    if options.jobs is None:
        asked = [_asked_gpus(drafts.whole(words)) for words, takes_all in is_open.items() if not takes_all]
        most = max(1, min(most, num_gpus // max(asked, default=1)))
        most = _as_many_as_fit(drafts, [words for words, takes_all in is_open.items() if takes_all], most)
    return Division(num_gpus=num_gpus, num_at_once=most) if most > 1 else None


def _as_many_as_fit(drafts: TrialDrafts, trials: list[tuple[str, ...]], most: int) -> int:
    """Return the largest number of parallel trials whose shares all suffice, as far as known; 1 if there is none."""
    num_gpus = len(drafts.machine.gpus)
    sizes = {
        num_gpus // num_at_once: num_at_once for num_at_once in range(1, most + 1)
    }  # the most trials for each share size
    for gpus_per_trial in sorted(sizes):
        if all(drafts.with_gpus(words, gpus_per_trial).exit_code == 0 for words in trials):
            return sizes[gpus_per_trial]
    return 1


def _takes_all(draft: Draft, num_gpus: int) -> bool:
    """Whether a trial runs on every GPU found here because the user set no number."""
    resolution = draft.resolution
    if resolution is None or resolution.problem is not None:
        return False
    config = resolution.config
    if not uses_this_machine(config) or config.hardware.generation is Generation.cpu:
        return False
    asked = asked_keys(resolution.choices)
    return config.hardware.gpus_per_node == num_gpus and asked.isdisjoint(_SAY_HOW_MANY)


def _asked_gpus(draft: Draft) -> int:
    """Return how many of this machine's GPUs a trial asks for."""
    config = draft.resolution.config if draft.resolution else None
    if config is None or not uses_this_machine(config) or config.hardware.generation is Generation.cpu:
        return 1
    return config.hardware.gpus_per_node or 1
