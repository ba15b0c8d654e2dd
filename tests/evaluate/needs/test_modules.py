from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tunebook.evaluate.needs.leaf_tasks import LeafTask, leaf_tasks
from tunebook.evaluate.needs.modules import imported_files, missing_packages
from tunebook.evaluate.task_files import FunctionName


def task(folder: Path, function: str = "utils.score") -> LeafTask:
    config = {"process_results": FunctionName(function), "metric_list": [{"aggregation": "mean"}]}
    return LeafTask(name="t", config=config, folder=folder)


def test_only_what_loading_cannot_do_without_is_missing(tmp_path: Path) -> None:
    (tmp_path / "utils.py").write_text(
        "import json\n"
        "import not_here_a.part\n"
        "from not_here_b import something\n"
        "from math_verify import parse\n"
        "if TYPE_CHECKING:\n    import not_here_c\n"
        "try:\n    import not_here_d\nexcept ImportError:\n    not_here_d = None\n"
        "try:\n    import not_here_e\nexcept ImportError:\n    raise ImportError('pip install it')\n"
        "def score():\n    import not_here_f\n"
    )
    assert missing_packages(task(tmp_path)) == ["math-verify", "not_here_a", "not_here_b", "not_here_e"]


def test_code_is_read_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "utils.py").write_text("import not_here\nraise SystemExit('was run')\n")
    assert missing_packages(task(tmp_path)) == ["not_here"]
    assert "utils" not in sys.modules
    (tmp_path / "broken.py").write_text("this is no Python")
    assert missing_packages(task(tmp_path, "broken.score")) == []


def test_modules_of_the_harness_are_followed_to_their_own(tasks: Path, tmp_path: Path) -> None:
    (tasks / "words").mkdir()
    (tasks / "words" / "shared.py").write_text("import not_here\nfrom lm_eval.tasks.words import util\n")
    (tasks / "words" / "util.py").write_text("from lm_eval.tasks.words.shared import anything\n")
    (tmp_path / "utils.py").write_text("from lm_eval.tasks.words import util\nimport lm_eval.api\n")
    found = task(tmp_path)
    assert imported_files(found) == {
        tmp_path / "utils.py", tasks / "words" / "util.py", tasks / "words" / "shared.py",
    }  # fmt: skip
    assert missing_packages(found) == ["not_here"]


def test_a_task_without_functions_imports_nothing(tmp_path: Path) -> None:
    (tmp_path / "utils.py").write_text("import not_here\n")
    assert imported_files(LeafTask(name="t", config={"doc_to_text": "utils.score"}, folder=tmp_path)) == frozenset()


@pytest.mark.parametrize("name", ["leaderboard_bbh", "leaderboard_gpqa", "leaderboard_mmlu_pro", "leaderboard_musr"])
def test_the_installed_leaderboard_needs_no_package_more(name: str) -> None:
    assert {package for leaf in leaf_tasks(name) for package in missing_packages(leaf)} == set()


def test_the_installed_ifeval_imports_the_code_that_it_is_scored_with() -> None:
    (leaf,) = leaf_tasks("leaderboard_ifeval")
    names = {"/".join(file.parts[-2:]) for file in imported_files(leaf)}
    assert names == {"ifeval/utils.py", "ifeval/instructions_registry.py", "ifeval/instructions.py",
                     "ifeval/instructions_util.py"}  # fmt: skip
