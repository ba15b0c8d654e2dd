"""Record the code and packages of a run, and how the packages differ from the lock that the evidence names.

Old evidence names the lock of its hardware generation whatever was installed, because runs did not compare packages
yet. `python -m tunebook.evidence.software recipes/*/evidence/*.json` corrects that statement from the files' content,
and redraws the cards and the README's table. Unrecorded versions stay unknown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunebook.config.book import book_root
from tunebook.config.choices import Generation
from tunebook.errors import RequestError, TunebookError
from tunebook.evidence.card import update_card, update_overview
from tunebook.evidence.compare import Row, Verdict
from tunebook.evidence.files import read_evidence, rewrite_evidence
from tunebook.evidence.schema import Evidence, Lock, Software
from tunebook.facts.generations import GENERATIONS
from tunebook.files import read_json, sha256_file
from tunebook.record.locks import PACKAGES, PROJECT, generation_versions, lock_differences, matters, python_difference

_NCCL = "nvidia-nccl"  # name prefix of the package that contains NCCL, in each version of CUDA


def gather_software(manifest: dict[str, Any]) -> Software:
    """Return the code and packages of a run. Runs without a commit are refused before this call."""
    environment = manifest["environment"]
    lock = _lock_of(environment)
    return Software(
        git_commit=str(manifest["code"]["git_commit"]),
        lock_sha256=None if lock is None else environment["lock_sha256"],
        lock=lock,
        image_digest=environment["image_digest"],
        python=environment["python"],
        packages=environment["packages"],
    )


def _lock_of(environment: dict[str, Any]) -> Lock | None:
    """Return the lock that a run was compared with; None if it was not, as in manifests of earlier versions."""
    found = environment.get("lock")
    if found is None or (found["differences"] is None and environment["lock_sha256"] is None):
        return None
    differences = found["differences"] or {}  # None for an image that lists no packages: its build found no differences
    important = {name: one for name, one in differences.items() if matters(name)}
    return Lock(
        name=found["name"], sha256=found["sha256"], differences=important,
        num_other_differences=len(differences) - len(important), num_unknown=0,
    )  # fmt: skip


def packages_row(recorded: Software, found: Software) -> Row | None:
    """Return a remark if the packages of the evidence or the run differ from their lock; None if neither does."""
    then, now = recorded.deviation(), found.deviation()
    if then is None and now is None:
        return None
    return Row(
        name="packages", expected=None, found=None, difference=None, tolerance=None, verdict=Verdict.shown,
        why=f"recorded: {then or 'as locked'}; this run: {now or 'as locked'}",
    )  # fmt: skip


def corrected(content: dict[str, Any], docker: Path) -> dict[str, Any]:
    """Correct an evidence file whose lock was never compared with its packages; return its content with what is known.

    Known are the packages that every manifest named, the interpreter and NCCL. Raises: RequestError if the lock that
    the file names is not in the folder `docker`.
    """
    software, hardware = content["software"], content["hardware"]
    facts = GENERATIONS[Generation[hardware["generation"]]]
    folder = docker / facts.image.name
    file = folder / "requirements.lock"
    if not file.is_file() or sha256_file(file) != software["lock_sha256"]:
        raise RequestError(
            f"the evidence names a lock of hash {software['lock_sha256']}, and {file} is another: check out commit "
            f"{software['git_commit'][:12]} in another folder and name its docker folder with --docker",
            problem_id="evidence-broken",
        )
    locked = generation_versions(folder, software["packages"])
    known = _known_versions(software, hardware, locked)
    named = {name: version for name, version in locked.items() if name in known}
    installed = {name: version for name, version in known.items() if version is not None}
    differences = python_difference(software["python"]) | lock_differences(named, installed)
    lock = Lock.model_validate(
        {"name": folder.name, "sha256": software["lock_sha256"], "differences": differences,
         "num_other_differences": None, "num_unknown": len(locked) - len(named)}
    )  # fmt: skip
    restated = {"git_commit": software["git_commit"], "lock_sha256": None, "lock": lock.model_dump(mode="json")}
    return content | {"software": restated | {key: value for key, value in software.items() if key not in restated}}


def _known_versions(
    software: dict[str, Any], hardware: dict[str, Any], locked: Mapping[str, str]
) -> dict[str, str | None]:
    """Return the installed versions that a file records, by package; None for one that was not installed.

    Manifests have named every installed package of PACKAGES since before there was evidence.
    """
    known: dict[str, str | None] = {name: software["packages"].get(name) for name in PACKAGES if name != PROJECT}
    if hardware["nccl"] is not None:
        known |= {name: hardware["nccl"] for name in locked if name.startswith(_NCCL)}
    return known


def correct_files(files: Sequence[Path], docker: Path) -> list[Path]:
    """Correct every file that needs it, and redraw the cards and the book's table; return the changed files."""
    changed = []
    for file in files:
        evidence: Evidence = read_evidence(file)  # complete and unedited
        content = read_json(file)
        if evidence.software.lock is None and evidence.software.lock_sha256 is not None:
            content = corrected(content, docker)
        content["inputs"]["config"] = evidence.inputs.config  # in the current format
        if content != read_json(file):
            rewrite_evidence(content, file)
            changed.append(file)
    for folder in sorted({file.parent for file in files}):
        recipe = folder.parent
        recorded = sorted(folder.glob("*.json"))
        update_card(recipe / "README.md", recorded)
        update_overview(recipe.parents[1] / "README.md", recipe.name, recorded)
    return changed


def main(arguments: list[str]) -> int:
    """Correct the named files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--docker", type=Path, default=book_root() / "docker", help="the locks of an earlier commit")
    asked = parser.parse_args(arguments)
    try:
        changed = correct_files(asked.files, asked.docker)
    except TunebookError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return error.exit_code
    for file in changed:
        print(f"{file}: {read_evidence(file).software.deviation()}")
    print(f"{len(changed)} of {len(asked.files)} files corrected")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
