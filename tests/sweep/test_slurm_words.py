from __future__ import annotations

import pytest

from tunebook.config.compose import compose
from tunebook.errors import RequestError
from tunebook.sweep.slurm_words import check_jobs, split_words


def test_the_job_gets_the_launchers_options_and_the_trial_what_concerns_its_ranks() -> None:
    words = ["launcher=slurm", "training.seed=0,1", "launcher.partition=main", "launcher.timeout_s=60"]
    for_job, inside = split_words(words)
    assert for_job == ["launcher=slurm", *words[1:]]
    assert inside == ["training.seed=0,1", "launcher.timeout_s=60", "launcher=local"]
    assert split_words(words[1:]) == (for_job, inside)  # it need not be typed
    assert split_words(for_job) == (for_job, inside)


@pytest.mark.parametrize("word", ["launcher=local", "launcher=ray", "launcher=slurm,local"])
def test_another_launcher_is_refused(word: str) -> None:
    with pytest.raises(RequestError, match=rf"--launcher=slurm and {word} ask for two launchers.*leave {word} out"):
        split_words([word])


def test_an_output_path_in_which_submitit_would_put_a_jobs_number_is_refused() -> None:
    check_jobs(compose("quickstart", ["launcher=slurm", "outputs=/runs/50%b"]).config)
    with pytest.raises(RequestError, match=r"outputs=/runs/50%j: submitit.*in the place of %j; write elsewhere"):
        check_jobs(compose("quickstart", ["launcher=slurm", "outputs=/runs/50%j"]).config)
