"""Every command that the README and the pages of docs/ quote is run: a new one fails here until somebody says how."""

from __future__ import annotations

import gzip
import importlib
import json
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = {file: file.read_text() for file in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}

# Commands too long to run again as they stand, and what is run for them.
INSTEAD = {
    "make train": "run whole by test_quickstart.py",
    "make eval": "run on the newest run by test_quickstart.py",
    "make report": "run on the newest run by test_quickstart.py",
    "make export": "run on the newest run below",
    "make test": "run whole by .ci/run, through make check",
    "make train RECIPE=qwen3b_zero2": "needs GPUs; the dry run below says what it would do",
    'make eval ARGS="model=org/name tasks=gsm8k,arc_easy"': "needs the hub; a folder is evaluated by tests/evaluate",
    "make fetch RECIPE=qwen3b_zero2": "needs the hub; tests/evaluate/test_fetch.py fetches from stand-ins",
    "tunebook verify quickstart": "run on the whole run by test_evidence.py",
    "tunebook reproduce outputs/quickstart/latest": "a short run is made again by test_evidence.py",
    "tunebook diff RUN RUN": "run by test_evidence.py",
    "tunebook verify RUN RUN --record --label cpu": "run by tests/commands/test_verify.py on made-up runs",
    "tunebook verify RUN --target 'validation_loss<=2.1@200'": "run by tests/commands/test_verify.py on made-up runs",
    "tunebook train chats.jsonl model=Qwen/Qwen3-0.6B peft=lora": "needs the hub; run by the ten minutes below",
    "docker compose run eval": "run in a container by docker/test_quickstart_in_a_container.py",
    'make eval ARGS="run=qwen05b_single suite=code"': "needs the hub; test_code.py runs the shipped problems",
    "make chat ARGS=\"'Reverse the order: rain key'\"": "asked of the run itself by test_chat.py",
}
# Every other command, by how it begins, and what its output must say.
EXPECTED = {
    "make help": "make TARGET",
    "make list": "llama2_70b_fsdp",
    "make train RECIPE=qwen3b_zero2 ARGS=--dry-run": "launch: ",
    'make train RECIPE=qwen3b_zero2 WHERE=local ARGS="hardware.num_nodes=2 hardware': "--rdzv-endpoint",
    'make train RECIPE=qwen3b_zero2 WHERE=local ARGS="hardware.num_nodes=2 launcher=slurm': "#SBATCH --nodes=2",
    "make train RECIPE=dolly3b_ray_zero3_offload": "tunebook.launch.ray",
    "make plan RECIPE=qwen3b_zero2 ARGS=hardware": "fits: ",
    "make plan RECIPE=qwen3b_zero2 ARGS=--all": "  # ",
    'make plan RECIPE=qwen3b_zero2 ARGS="--compare': "tokens/s",
    "make plan RECIPE=quickstart ARGS=--yaml": "max_length: ",
    "make plan RECIPE=qwen3_4b_long ARGS=--longest": "Longest row shared by 2 GPUs",
    "make plan RECIPE=quickstart ARGS=--measure": "on each rank, measured on ",
    "make sweep RECIPE=qwen3b_zero2": "2 trials",
    'make sweep ARGS="training.seed=0,1 --jobs=2': "2 at a time",
    'make sweep ARGS="training.seed=0,1 launcher=slurm': "8 at a time",
    "make sweep ARGS=\"'optimizer.learning_rate=tag(log": "20 trials, 1 at a time, over optimizer.learning_rate",
    "make data RECIPE=quickstart": "15,000",
    "make sweep RECIPE=quickstart": "4 trials",
    "make doctor": "0 errors",
    "make explain ARGS=bf16-on-volta": "torch emulates bf16 there",
    "tunebook train chats.parquet model=my/model": "launch: ",
    "tunebook init mine 'chats/*.jsonl'": "  tunebook plan mine\n",
}
TEN_MINUTES = ROOT / "docs" / "ten_minutes.md"
# What the ten minutes need from the hub, and what is there in the test.
IN_PLACE_OF = {"Qwen/Qwen3-0.6B": "./my/model", "tasks=ifeval": "suite=quickstart --limit 2"}
# And what its commands print, in order.
PRINTED = {
    "tunebook data": "no model is named",
    "tunebook plan": "outputs/chats/<time>",
    "tunebook train": "run folder: ",
    "tunebook chat": "",
    "tunebook eval tasks=": "outputs/chats/",
    "tunebook eval model=": "quickstart",
    "tunebook export": "hf upload ORG/NAME",
    "tunebook init": "  tunebook train my_chats\n",
    "tunebook sweep": "3 trials",
}
CONVERSATION = {"messages": [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello."}]}


def commands() -> list[str]:
    """Every line of the pages' shell blocks, once and without its comment, but for those of the ten minutes."""
    lines = [line for page in PAGES if page != TEN_MINUTES for line in commands_of(page)]
    return [line for line in dict.fromkeys(lines) if line not in commands_of(TEN_MINUTES)]


def commands_of(page: Path) -> list[str]:
    """The lines of a page's shell blocks, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGES[page], re.DOTALL)
    lines = [re.sub(r"\s+#.*", "", line).strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


@pytest.fixture
def own_folder(tmp_path):
    """A folder with the data and the model that the commands name."""
    import pyarrow
    import pyarrow.parquet

    lines = [json.dumps(CONVERSATION) + "\n"] * 80
    (tmp_path / "chats.jsonl").write_text("".join(line.replace("Hello?", f"{n}?") for n, line in enumerate(lines * 2)))
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "a.jsonl").write_text("".join(lines))
    with gzip.open(tmp_path / "chats" / "b.jsonl.gz", "wt") as file:
        file.writelines(lines)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([CONVERSATION] * 80), tmp_path / "chats.parquet")
    model = shutil.copytree(ROOT / "recipes" / "quickstart" / "model", tmp_path / "my" / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))  # as any real model
    return tmp_path


def test_every_command_is_handled():
    quoted = commands()
    unknown = [line for line in quoted if line not in INSTEAD and expected_of(line) is None]
    assert unknown == [], "say in this file how the new command is tested"
    stale = [start for start in (*INSTEAD, *EXPECTED) if not any(line.startswith(start) for line in quoted)]
    assert stale == [], "no page has these any more"


def expected_of(line: str) -> str | None:
    """What the output of a command must say; None for one that is not known."""
    return next((text for start, text in EXPECTED.items() if line.startswith(start)), None)


def test_what_is_run_elsewhere_is_run_there(run):
    assert "make check" in (ROOT / ".ci" / "run").read_text()
    assert "pytest" in run(["make", "-n", "check"]).output
    assert "front.sh run train quickstart" in run(["make", "-n", "train"]).output
    assert '"make", "train"' in (ROOT / "tests" / "system" / "conftest.py").read_text()


@pytest.mark.parametrize("line", [line for line in commands() if line.startswith("make ") and expected_of(line)])
def test_make_commands_run_as_written(run, line):
    ended = run(["bash", "-c", line])
    assert ended.exit_code == 0, ended.output
    assert expected_of(line) in ended.output


@pytest.mark.parametrize(
    "line",
    [line for line in commands() if line.startswith(("tunebook train ", "tunebook init ")) and expected_of(line)],
)
def test_commands_for_own_data_and_model_run_as_written(run, own_folder, line):
    ended = run(["bash", "-c", line], cwd=own_folder)
    assert ended.exit_code == 0, ended.output
    assert expected_of(line) in ended.output
    assert not (own_folder / "outputs").exists()  # no run is started


def test_the_ten_minutes_run_as_written_with_a_model_made_here(run, own_folder):
    from transformers import AutoConfig, AutoModelForCausalLM

    model = own_folder / "my" / "model"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    lines = commands_of(TEN_MINUTES)
    assert len(lines) == len(PRINTED)
    for line, (start, printed) in zip(lines, PRINTED.items(), strict=True):
        typed = line
        for there, here in IN_PLACE_OF.items():
            typed = typed.replace(there, here)
        ended = run(["bash", "-c", typed], cwd=own_folder)
        assert ended.exit_code == 0, f"{typed}\n{ended.output}"
        assert line.startswith(start) and printed in ended.output, typed
    (trained,) = (own_folder / "outputs").glob("chats/2*/model/adapter_model.safetensors")
    assert trained.stat().st_size > 10_000
    assert (own_folder / "my_export" / "model.safetensors").stat().st_size > 1_000_000


def test_the_newest_run_is_exported(quickstart, run):
    ended = run(["make", "export", f"ARGS=--outputs {quickstart.outputs}"])
    assert ended.exit_code == 0, ended.output
    assert "written: " in ended.output


def test_every_folder_of_the_layout_is_there():
    layout = README.split("## Layout")[1].split("## ")[0]
    names = re.findall(r"^    (\S+)  ", layout, re.MULTILINE)
    assert len(names) >= 5
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_links_lead_somewhere():
    found = 0
    for page, text in PAGES.items():
        links = re.findall(r"(?:\]\(|src=\")([^)\"]+)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        links = [link for link in links if not link.startswith(("http", "#"))]
        assert [link for link in links if not (page.parent / link.partition("#")[0]).exists()] == []
        found += len(links)
    assert found > 30


@pytest.mark.parametrize("name", ["flow", "results"])
def test_the_figures_are_what_their_scripts_draw(name, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    drawn = importlib.import_module(name).draw()
    assert (ROOT / "docs" / f"{name}.svg").read_text() == drawn, f"type: python docs/{name}.py"
