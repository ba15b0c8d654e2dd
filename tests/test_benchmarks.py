"""Each benchmark explains its arguments, and none imports torch before it needs it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(file.stem for file in BENCHMARKS.glob("*.py") if '__name__ == "__main__"' in file.read_text())


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
