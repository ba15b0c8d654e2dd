"""Each benchmark and each script of a recipe explains its arguments; no benchmark imports torch early."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
RECIPES = BENCHMARKS.parent / "recipes"
MAIN = '__name__ == "__main__"'
SCRIPTS = sorted(file.stem for file in BENCHMARKS.glob("*.py") if MAIN in file.read_text())
RECIPE_SCRIPTS = sorted(file for file in RECIPES.glob("*/*.py") if MAIN in file.read_text())


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_benchmark_parses_its_arguments(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = importlib.import_module(name)
    with pytest.raises(SystemExit) as ended:
        script.main(["--help"])
    assert ended.value.code == 0
    assert f"python benchmarks/{name}.py" in capsys.readouterr().out, "its docstring says how to run it"


def test_importing_the_benchmarks_is_cheap() -> None:
    imports = f"import {', '.join(SCRIPTS)}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", imports], cwd=BENCHMARKS).returncode == 0


@pytest.mark.parametrize("script", RECIPE_SCRIPTS, ids=lambda script: f"{script.parent.name}/{script.name}")
def test_a_script_of_a_recipe_parses_its_arguments(script: Path, tmp_path: Path) -> None:
    for word, code in (("--help", 0), ("--nonsense", 2)):
        assert subprocess.run([sys.executable, script, word], cwd=tmp_path, capture_output=True).returncode == code
    assert not list(tmp_path.iterdir())
