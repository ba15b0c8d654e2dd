"""Run lm-evaluation-harness task by task through its Python API, quietly and on fresh data.

All tasks are loaded with their data before the first one runs, so that a missing data set is reported at once rather
than an hour later.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tunebook.config.choices import Format
from tunebook.data.formats import FormatSettings, Normalizer
from tunebook.data.images import ImageReader, write_images
from tunebook.data.problems import DocumentError, DocumentProblems
from tunebook.data.readers import read_records
from tunebook.errors import DataError, RequestError, TunebookError, did_you_mean, first_line
from tunebook.evaluate.code.code_task import book_task_files
from tunebook.evaluate.results import MAX_GEN_TOKS
from tunebook.evaluate.task_files import Task, refuse_code, runs_code
from tunebook.files import cache_root, sha256_text
from tunebook.train.rank_process import hide_import_warnings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tunebook.data.conversation import Conversation
    from tunebook.model.processor import ImageProcessor

SEEDS = {"python": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}  # the harness' own defaults
GROUP_KEY = "task"  # key next to a conversation in its file: the group that its score counts for
_NO_CACHE = "Couldn't find cache"  # message of `datasets` if it has only another configuration of the data
_HUB_TIMEOUT_S = 5.0
_FILE_FORMATS = ("arrow", "csv", "json", "parquet", "text")  # of `datasets`: a `dataset_path` that is no data set


@dataclass(frozen=True, kw_only=True)
class HarnessSettings:
    """Everything that the prompts and results depend on, except the tasks and the model's weights."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int  # prompt and answer together, in tokens
    num_fewshot: int | None  # None: the task's own
    limit: int | None  # items per task; None: all
    system_prompt: str | None  # added to prompts that have none
    load_processor: Callable[[], ImageProcessor] | None = None  # of the model, for prompts with images
    download_images: bool = False


@dataclass(frozen=True, kw_only=True)
class LoadedTask:
    """A requested task with its data: one task of the harness, or all of a group or tag."""

    source: Task
    content: dict[str, Any]  # the harness' `tasks` and `groups`, by name


def prepare_environment(is_offline: bool) -> None:
    """Set environment variables that the harness' libraries read on import; call it before importing them."""
    hide_import_warnings()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if not sys.stderr.isatty():  # a log gets a line for each task
        os.environ["TQDM_DISABLE"] = "1"
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Code-executing tasks are refused; this stops one that executes programs when it is imported.
    os.environ["HF_ALLOW_CODE_EVAL"] = "0"
    # Some tasks download nltk's data on import: into the cache, which outlives containers.
    folder = Path(os.environ.setdefault("NLTK_DATA", str(cache_root() / "nltk_data")))
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)  # nltk refuses a folder that others may write to
    os.environ["NLTK_ALLOW_PROXIED_URLOPEN"] = "1"
    if is_offline or not _reaches_hub():
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ["HF_DATASETS_OFFLINE"] = "1"


def _reaches_hub() -> bool:
    """Whether the hub answers. If it does not, the libraries would try for minutes before they take what is cached."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_TIMEOUT_S)
    except Exception:  # of the HTTP library, or of the hub's if it is told to work offline
        constants.HF_HUB_OFFLINE = True
        return False
    return True


def load_tasks(tasks: Sequence[Task], cache: Path, settings: HarnessSettings | None = None) -> list[LoadedTask]:
    """Load tasks with their data. Only tasks of held-out conversations need `settings`, to render them.

    `cache` is a folder for this process alone: a cache kept between runs could hide changed data. Raises: RequestError
    with every task that cannot be loaded, DataError for unusable held-out conversations.
    """
    loaded: list[LoadedTask] = []
    errors: list[RequestError] = []
    for task in tasks:
        try:
            loaded.append(LoadedTask(source=task, content=_load(task, cache, settings)))
        except RequestError as error:
            errors.append(error)
    if errors:
        text = "\n".join(" ".join(error.message.split()) for error in errors)
        raise RequestError(text, problem_id=errors[0].problem_id)
    return loaded


def run_task(model: Any, loaded: LoadedTask, settings: HarnessSettings) -> dict[str, Any]:
    """Run a requested task and return the harness' results. Raises: errors of the harness and the task's functions."""
    from lm_eval.evaluator import evaluate

    is_chat = loaded.source.conversations is None and settings.tokenizer.chat_template is not None
    seed_libraries()
    for task in loaded.content["tasks"].values():
        # As the harness' own `simple_evaluate`: a task that sets 0 keeps it, one that sets nothing has none.
        own = task.get_config("num_fewshot")
        if own is None or (settings.num_fewshot is not None and own != 0):
            task.set_config(key="num_fewshot", value=settings.num_fewshot or 0)
        task.set_fewshot_seed(seed=SEEDS["fewshot"])
    results: dict[str, Any] = evaluate(
        lm=model,
        task_dict=loaded.content,
        limit=settings.limit,
        apply_chat_template=is_chat,
        fewshot_as_multiturn=True,
        system_instruction=settings.system_prompt if is_chat else None,
    )
    return results


@lru_cache(maxsize=1)
def _harness_index() -> Any:
    """The harness' manager of its own tasks, which reads thousands of files."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _load(task: Task, cache: Path, settings: HarnessSettings | None) -> dict[str, Any]:
    """Load one task. Raises: RequestError for an unknown name, missing data, and a task that executes programs."""
    from lm_eval.tasks import TaskManager

    seed_libraries()  # tasks such as gpqa shuffle their choices while they are loaded
    try:
        if task.file is None:
            index = _harness_index().task_index
            if task.name not in index:
                known = [*index, *book_task_files()]
                raise RequestError(
                    f"evaluation.tasks: there is no task '{task.name}' in lm-evaluation-harness."
                    f"{did_you_mean(task.name, known)} Name a task of your own by its file, such as tasks/mine.yaml",
                    problem_id="unknown-task",
                )
            if runs_code(index[task.name].cfg or {}):
                raise refuse_code(task.name)
            loaded = _harness_index().load([task.name])
        else:
            written = _task_settings(task, cache, settings)
            _require_metrics(task, written)
            loaded = TaskManager(include_defaults=False).load([written])
    except TunebookError:
        raise
    except Exception as error:  # a task's own functions and templates may raise anything
        raise _load_error(task, error) from error
    if any(getattr(child, "UNSAFE_CODE", False) for child in loaded["tasks"].values()):
        raise refuse_code(task.name)
    if task.conversations is None and any(getattr(child, "MULTIMODAL", False) for child in loaded["tasks"].values()):
        raise RequestError(
            f"evaluation.tasks: '{task.name}' reads its images or sound in the harness' own way; images are read from "
            "held-out conversations, which a task file of yours names: metadata.conversations",
            problem_id="task-with-media",
        )
    return dict(loaded)


def _require_metrics(task: Task, written: dict[str, Any]) -> None:
    """Refuse metrics that the harness would call as None. Raises: RequestError."""
    from lm_eval.api.registry import get_metric, metric_registry

    if written.get("process_results") is not None:
        return
    for entry in written.get("metric_list") or ():
        name = entry.get("metric")
        if isinstance(name, str) and get_metric(name, entry.get("hf_evaluate") is True) is None:
            raise RequestError(
                f"{task.file}: metric_list: lm-evaluation-harness has no metric '{name}'."
                f"{did_you_mean(name, metric_registry.keys())} In metric_list type exact_match for generate_until, and "
                "acc for multiple_choice",
                problem_id="unknown-metric",
            )


def _load_error(task: Task, error: Exception) -> RequestError:
    """Return the error of a task that cannot be loaded, with what to type."""
    name = task.name if task.file in (None, *book_task_files().values()) else str(task.file)
    reason = f"KeyError: {error}" if isinstance(error, KeyError) else first_line(error)
    if isinstance(error, ConnectionError | FileNotFoundError) or str(error).startswith(_NO_CACHE):
        return RequestError(
            f"the data of task {name} is not on this machine and cannot be fetched ({reason}); with a "
            f"network, type: tunebook fetch tasks={name}",
            problem_id="task-data-missing",
        )
    return RequestError(f"lm-evaluation-harness refuses task {name}: {reason}", problem_id="task-file")


def seed_libraries() -> None:
    """Seed the libraries as the harness' own `simple_evaluate`."""
    import numpy
    import torch

    random.seed(SEEDS["python"])
    numpy.random.seed(SEEDS["numpy"])
    torch.manual_seed(SEEDS["torch"])


def _task_settings(task: Task, cache: Path, settings: HarnessSettings | None) -> dict[str, Any]:
    """Return the settings of a task file as the harness loads them, with the data that belongs to this evaluation."""
    from lm_eval.tasks._yaml_loader import load_yaml

    assert task.file is not None
    config: dict[str, Any] = load_yaml(task.file)
    if task.code is not None:
        return config | task.code.harness_keys(cache)
    if task.conversations is None:
        arguments = config.get("dataset_kwargs") or {}
        if config.get("dataset_path") in _FILE_FORMATS and "data_files" in arguments:
            config["dataset_kwargs"] = arguments | {"data_files": _data_files(arguments["data_files"], task.file)}
        return config
    assert settings is not None
    items, prompts = render_conversations(
        task.conversations,
        settings.system_prompt,
        settings.tokenizer,
        download_images=settings.download_images,
        load_processor=settings.load_processor,
    )
    if "images" in items[0]:
        own = config.get("num_fewshot")
        if own != 0 and (own if settings.num_fewshot is None else settings.num_fewshot):
            raise RequestError(
                f"{task.file}: its prompts have images, and the examples before them would come without theirs; write "
                "num_fewshot: 0 into the file, which then has none",
                problem_id="examples-with-images",
            )
        config["doc_to_image"] = "images"
    max_gen_tokens = (config.get("generation_kwargs") or {}).get("max_gen_toks", MAX_GEN_TOKS)
    check_prompt_lengths(prompts, settings.tokenizer, settings.max_length - max_gen_tokens)
    file = cache / f"{sha256_text(task.name)[:16]}-prompts.jsonl"  # a name may have slashes
    file.write_text("".join(json.dumps(item) + "\n" for item in items))
    return config | {
        "dataset_path": "json",
        "dataset_name": None,
        "test_split": "test",
        "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": str(cache)},
    }


def _data_files(files: Any, task_file: Path) -> Any:
    """Return a task's data files, where those beside its file are taken from there; else the working directory's.

    Raises: RequestError for a file in neither.
    """
    if isinstance(files, Mapping):
        return {split: _data_files(each, task_file) for split, each in files.items()}
    if isinstance(files, list):
        return [_data_files(each, task_file) for each in files]
    if "://" in files:
        return files
    beside = task_file.parent / files
    for place in (beside, Path(files)):
        if any(place.parent.glob(place.name)):
            return str(place)
    raise RequestError(
        f"{task_file}: dataset_kwargs.data_files: no file {beside}; type a path from the task's folder",
        problem_id="task-file",
    )


def with_images(
    prompt: str, images: Sequence[Mapping[str, Any]], processor: ImageProcessor, origin: str = "this prompt"
) -> str:
    """A rendered prompt with all tokens of its images. Raises: DataError."""
    return write_images(prompt, [], images, processor, origin)[0] if images else prompt


class HeldOut(NamedTuple):
    """A held-out conversation, its group if it names one, and its file and line."""

    conversation: Conversation
    group: str | None
    origin: str


def read_conversations(file: Path, system_prompt: str | None, *, download_images: bool) -> list[HeldOut]:
    """Held-out conversations in any trainable format.

    As in training, `system_prompt` is added to those without one. Raises: DataError with every problem.
    """
    problems = DocumentProblems(str(file))
    reader = ImageReader(may_download=download_images, folder=file.parent)
    normalizer = Normalizer(Format.auto, FormatSettings(system_prompt=system_prompt, images=reader))
    conversations = []
    for number, record in read_records(file, problems, normalizer.account):
        with problems.noted(number):
            group = record.get(GROUP_KEY)
            conversation = _answered(normalizer.row(record))
            conversations.append(HeldOut(conversation, None if group is None else str(group), f"{file}:{number}"))
    problems.num_documents = len(conversations)
    problems.raise_if_any()
    if not conversations:
        raise DataError(
            f"{file} holds no conversation, so there is nothing to evaluate on", problem_id="data-file-empty"
        )
    return conversations


def render_conversations(
    file: Path,
    system_prompt: str | None,
    tokenizer: PreTrainedTokenizerBase,
    *,
    download_images: bool = False,
    load_processor: Callable[[], ImageProcessor] | None = None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Render documents with the keys `prompt`, `answer` (a conversation's last turn), `task` (its group), and `images`.

    The last only where any document has images. The answer of a turn that calls tools is JSON text: a list of {name,
    arguments}. Also returns the prompts with all tokens of their images. Raises: as `read_conversations`, and DataError
    for a prompt that the model does not take.
    """
    from tunebook.data.template import ConversationRenderer

    conversations = read_conversations(file, system_prompt, download_images=download_images)
    renderer = ConversationRenderer(tokenizer)
    has_images = any(talk.images() for talk, _, _ in conversations)
    # A model of text alone is refused here, and not by its template.
    processor = load_processor() if has_images and load_processor is not None else None
    items, whole = [], []
    for talk, group, origin in conversations:
        last = talk.messages[-1]
        calls = [call["function"] for call in last.get("tool_calls", ())]
        answer = json.dumps(calls, ensure_ascii=False) if calls else last["content"]
        prompt = renderer.prompt(talk.until(len(talk.messages) - 1), origin)
        whole.append(prompt if processor is None else with_images(prompt, talk.images(), processor, origin))
        images = {"images": talk.images()} if has_images else {}
        items.append({"prompt": prompt, "answer": answer, "task": group, **images})
    return items, whole


def _answered(row: dict[str, Any]) -> Conversation:
    """The conversation of a row whose last turn is the expected answer. Raises: DocumentError."""
    from tunebook.data.conversation import Conversation

    if not row.get("messages"):
        raise DocumentError("it is not a conversation; write it as ShareGPT or messages")
    talk = Conversation.of(row)
    if talk.messages[-1]["role"] != "assistant":
        raise DocumentError("it must end with the assistant's turn, which is the expected answer")
    return talk


def check_prompt_lengths(prompts: list[str], tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int) -> None:
    """Refuse prompts that the harness would truncate at the start to leave space for the answer. Raises: DataError."""
    encoded = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    longest = max(map(len, encoded))
    if longest > max_prompt_tokens:
        raise DataError(
            f"a held-out prompt has {longest} tokens, and the model's context leaves {max_prompt_tokens} for prompts; "
            "shorten it, or lower generation_kwargs.max_gen_toks in the task's file",
            problem_id="heldout-too-long",
        )
