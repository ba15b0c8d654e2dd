"""The commands of `gpu_evaluation`, in the order of starting, and which GPUs each gets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_queue import Job

ROOT = Path(__file__).resolve().parents[2]
BENCH = Path(__file__).resolve().parent
PROMPTS = (
    "Reverse the order: rain key chair",
    "Say the contrary: far wet",
    "Which number is the largest: sixteen nine six",
)
_BOTH = (0, 1)


@dataclass(frozen=True, kw_only=True)
class Try:
    """One command, and which GPUs it gets."""

    name: str
    words: list[str]  # after `tunebook`, or after `python` for the script that makes the models
    gpus: tuple[int, ...] = ()  # none: it runs at once, and sees none
    is_alone: bool = False  # on its GPUs: for its speed, or because it fills their memory
    after: tuple[str, ...] = ("subjects",)  # what must have ended well
    compare_with: str | None = None
    gpu_gib: float | None = None  # as if each GPU had only that
    expected_exit: int = 0
    is_tunebook: bool = True
    run: str | None = None  # that is evaluated; each gets a copy of it, since they run side by side
    needs_gpus: bool = False  # also to try the script
    note: str = ""

    def job(self, priority: int) -> Job:
        """As the queue of training runs sees it, for whose turn it is."""
        holds = bool(self.gpus)
        return Job(
            name=self.name,
            gpus=self.gpus,
            words=[],
            line={},
            priority=priority,
            is_alone=self.is_alone,
            holds_gpus=holds,
        )


def tries(folder: Path, *, is_cpu: bool) -> list[Try]:
    """Everything in the order of starting; `folder` holds models, tasks and runs."""
    return [
        *_preparing(folder, is_cpu=is_cpu),
        *_random(folder),
        *_trained(),
        *_formats(folder),
        *_chats(folder),
        Try(
            name="tests",
            words=[
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "-m",
                "gpu or multigpu",
                str(ROOT / "tests/evaluate/chat"),
            ],
            gpus=_BOTH,
            is_tunebook=False,
            needs_gpus=True,
            note="the tests beside this that need GPUs",
        ),
    ]


def _preparing(folder: Path, *, is_cpu: bool) -> list[Try]:
    script = str(BENCH / "gpu_evaluation_subjects.py")
    steps = 30 if is_cpu else 600  # half of the recipe: most answers are right then
    hardware = ["hardware=cpu"] if is_cpu else []
    train = ["train", "quickstart", "evaluation=none", "attention=sdpa", "hardware.gpus_per_node=1", *hardware]
    saving = ["training.save_every_steps=null", "training.evaluate_every_steps=null", f"training.max_steps={steps}"]
    small = ["--small"] if is_cpu else []
    own: dict[str, Any] = {"after": (), "is_tunebook": False}
    return [
        Try(name="train", words=[*train, *saving, "--run-folder", str(folder / "trained")], gpus=(0,), after=()),
        Try(
            name="train_lora",
            words=[*train, *saving, "peft=lora", "optimizer.learning_rate=3e-3", "--run-folder", str(folder / "lora")],
            gpus=(0,),
            after=(),
        ),
        Try(name="subjects", words=[script, str(folder), *small], gpus=(1,), **own),
        Try(
            name="subjects_trained",
            words=[script, str(folder), "--trained", str(folder / "trained")],
            **own | {"after": ("train",)},
        ),
    ]  # fmt: skip


def _trained() -> list[Try]:
    """The quickstart on its own tasks: bf16 over fp32 weights, as it was trained."""
    words = ["eval", "suite=quick", "--fresh"]
    shared: dict[str, Any] = {"after": ("train",), "run": "trained"}
    return [
        Try(name="quick_one", words=words, gpus=(0,), **shared),
        Try(name="lora_one", words=words, gpus=(0,), after=("train_lora",), run="lora"),
        Try(name="quick_two", words=words, gpus=_BOTH, compare_with="quick_one", note="a copy each", **shared),
    ]  # fmt: skip


def _random(folder: Path) -> list[Try]:
    """Models with random weights, in fp32: scores mean nothing, but must not depend on how they are computed."""
    tasks = folder / "tasks"

    def words(model: str, *kinds: str, more: tuple[str, ...] = ()) -> list[str]:
        return [
            "eval",
            f"model={folder / model}",
            "tasks=" + ",".join(str(tasks / f"{kind}.yaml") for kind in kinds),
            *more,
        ]

    short = words("whole", "short_choice", "short_answer", "short_text")
    half = words("half", "short_choice", "short_answer", "short_text")
    four, answers = words("four_layers", "long_choice"), words("four_layers", "long_answer")
    by_four, far_too_large = ("--batch-size", "4"), "the batch size begins far too large"
    return [
        Try(name="long_auto", words=four, gpus=(1,), compare_with="long_by_4", note=far_too_large, is_alone=True),
        Try(name="long_by_4", words=[*four, *by_four], gpus=(0,)),
        Try(name="half_one", words=half, gpus=(0,)),
        Try(name="whole_one", words=short, gpus=(1,), is_alone=True),
        Try(
            name="copies",
            words=[str(BENCH / "gpu_copies.py"), str(folder / "whole")],
            gpus=(1,),
            is_alone=True,
            is_tunebook=False,
            note="of weights in bf16 that autocast keeps",
        ),
        Try(name="whole_two", words=short, gpus=_BOTH, is_alone=True, compare_with="whole_one", note="a copy each"),
        Try(name="long_two", words=four, gpus=_BOTH, compare_with="long_by_4", note=far_too_large, is_alone=True),
        Try(
            name="whole_sharded",
            words=short,
            gpus=_BOTH,
           
            compare_with="whole_one",
            needs_gpus=True,
            gpu_gib=2.5,  # the weights are 1.84 GiB, and room is needed beside them
            note="one model over both GPUs",
        ),
        Try(
            name="half_sharded",
            words=half,
            gpus=_BOTH,
           
            compare_with="half_one",
            needs_gpus=True,
            gpu_gib=3.0,
            note="fp32 weights computed in fp16, over both GPUs",
        ),
        Try(name="whole_too_large", words=short, gpus=(0,), needs_gpus=True, gpu_gib=2.5, expected_exit=3),
        Try(
            name="answers_auto",
            words=answers,
            gpus=(1,),
           
            compare_with="answers_by_4",
            needs_gpus=True,
            gpu_gib=4.0,
            note=far_too_large,
        ),
        Try(name="answers_by_4", words=[*answers, *by_four], gpus=(0,)),
    ]  # fmt: skip


def _formats(folder: Path) -> list[Try]:
    """The trained model in fp32, against bf16 weights; the run itself computes in bf16 with fp32 weights."""
    tasks = [str(ROOT / "recipes/quickstart/tasks/quickstart.yaml")]
    tasks += [str(folder / "tasks" / f"short_{kind}.yaml") for kind in ("choice", "text")]
    shared: dict[str, Any] = {"after": ("subjects", "subjects_trained")}
    words = ["tasks=" + ",".join(tasks)]
    return [
        Try(name="format_fp32", words=["eval", f"model={folder / 'trained_fp32'}", *words], gpus=(0,), **shared),
        Try(
            name="format_fp32_two",
            words=["eval", f"model={folder / 'trained_fp32'}", *words],
            gpus=_BOTH,
            compare_with="format_fp32",
            note="a copy each",
            **shared,
        ),
        Try(
            name="format_bf16",
            words=["eval", f"model={folder / 'trained_bf16'}", *words],
            gpus=(1,),
            compare_with="format_fp32",
            note="the difference is recorded, not judged",
            **shared,
        ),
    ]


def _chats(folder: Path) -> list[Try]:
    chats = []
    for number, prompt in enumerate(PROMPTS):
        words = ["chat", str(folder / "trained"), "--prompt", prompt]
        chats.append(Try(name=f"chat_cpu_{number}", words=words, after=("train",)))
        on_gpu = Try(
            name=f"chat_gpu_{number}",
            words=words,
            gpus=(number % 2,),
            after=("train",),
            compare_with=f"chat_cpu_{number}",
        )
        chats.append(on_gpu)
    return chats
