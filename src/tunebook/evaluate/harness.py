"""Run lm-evaluation-harness task by task through its Python API, quietly and on fresh data.

All tasks are loaded with their data before the first one runs, so that a missing data set is reported at once rather
than an hour later. Each task then runs separately, so that an evaluation can be resumed. The harness' own classes
aggregate the group scores afterwards.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from tunebook.config.choices import Format
from tunebook.data.formats import FormatSettings, Normalizer
from tunebook.data.problems import DocumentError, DocumentProblems
from tunebook.data.readers import read_records
from tunebook.errors import DataError, RequestError, TunebookError, first_line
from tunebook.evaluate.code.code_task import book_task_files, check_context
from tunebook.evaluate.task_files import Task, harness_tasks, task_folder
from tunebook.files import atomic_write_text, cache_root, sha256_file, sha256_text
from tunebook.hardware.disk import is_disk_full
from tunebook.train.rank_process import hide_import_warnings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tunebook.data.conversation import Conversation

SEEDS = {"python": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}  # the harness' own defaults
GROUP_KEY = "task"  # key next to a conversation in its file: the group that its score counts for
UNGROUPED = "all"  # the group of conversations without that key
_NO_CACHE = "Couldn't find cache"  # message of `datasets` if it has only another configuration of the data
_HUB_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class HarnessSettings:
    """Everything that the prompts and results depend on, except the tasks and the model's weights."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int  # prompt and answer together, in tokens
    num_fewshot: int | None  # None: the task's own
    limit: int | None  # items per task; None: all
    system_prompt: str | None  # added to prompts that have none
    items_folder: Path  # folder of the rendered prompts
    cache_folder: Path  # private to this evaluation: a cache kept between runs could hide changed data
    max_gen_toks: int = 256  # answer length if the task sets none; the harness' default


@dataclass(frozen=True, kw_only=True)
class LoadedTask:
    """A task of the harness with its data."""

    name: str
    task: Any  # the harness' own object
    source: Task  # it, or the group that it is in
    source_sha256: str | None  # of the user's file and those next to it; None: a task of the harness

    @property
    def is_rendered(self) -> bool:
        """Whether its prompts already went through the chat template."""
        return self.source.conversations is not None


@dataclass(kw_only=True)
class LoadedTasks:
    """All requested tasks."""

    tasks: dict[str, LoadedTask] = field(default_factory=dict)  # in the order they run
    groups: dict[str, Any] = field(default_factory=dict)  # the harness' own objects, by name
    missing: dict[str, RequestError] = field(default_factory=dict)  # tasks that cannot be loaded


def prepare_environment(is_offline: bool) -> None:
    """Set environment variables that the harness' libraries read on import; call it before importing them."""
    hide_import_warnings()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if not sys.stderr.isatty():  # a log gets a line for each task
        os.environ["TQDM_DISABLE"] = "1"
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Code-executing tasks are refused by name; this stops one that is part of a group.
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


def load_tasks(tasks: Sequence[Task], settings: HarnessSettings) -> LoadedTasks:
    """Load the harness' objects with their data; tasks that cannot be loaded are listed in `missing`.

    Raises: RequestError if no task can be loaded, DataError for unusable held-out conversations; disk-full errors
    unchanged.
    """
    loaded = LoadedTasks()
    for task in tasks:
        try:
            found = _load(task, settings)
        except RequestError as error:
            loaded.missing[task.name] = error
            continue
        loaded.groups |= found["groups"]
        for child in found["tasks"].values():
            _set_fewshot(child, settings.num_fewshot)
            loaded.tasks[child.task_name] = LoadedTask(
                name=child.task_name, task=child, source=task, source_sha256=_source_hash(task.file)
            )
    if not loaded.tasks:
        errors = list(loaded.missing.values())
        raise RequestError("\n".join(error.message for error in errors), problem_id=errors[0].problem_id)
    return loaded


@contextmanager
def loaded_without_model(tasks: Sequence[Task], limit: int | None = None) -> Iterator[LoadedTasks]:
    """Load tasks that render no conversations, so that no tokenizer is needed."""
    with TemporaryDirectory(prefix="tunebook-evaluation-") as folder:
        settings = HarnessSettings(
            tokenizer=cast(Any, None),
            max_length=sys.maxsize,
            num_fewshot=None,
            limit=limit,
            system_prompt=None,
            items_folder=Path(folder),
            cache_folder=Path(folder),
        )
        yield load_tasks(tasks, settings)


def run_task(model: Any, loaded: LoadedTask, settings: HarnessSettings) -> dict[str, Any] | None:
    """Run one task and return the harness' results; of several processes, the first gets them.

    Raises: errors of the harness and of the task's own functions.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    is_chat = has_template(loaded, model.tokenizer)
    require_system_prompt(model.tokenizer, settings.system_prompt if is_chat else None)
    with _without_environment_report():
        results: dict[str, Any] | None = simple_evaluate(
            model=model,
            tasks=[loaded.task],
            num_fewshot=settings.num_fewshot,
            limit=settings.limit,
            apply_chat_template=is_chat,
            system_instruction=settings.system_prompt if is_chat else None,
            task_manager=TaskManager(include_defaults=False),
            random_seed=SEEDS["python"],
            numpy_random_seed=SEEDS["numpy"],
            torch_random_seed=SEEDS["torch"],
            fewshot_random_seed=SEEDS["fewshot"],
        )
    return results


def _load(task: Task, settings: HarnessSettings) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._index import Entry, Kind

    folder = task.file.parent if task.file is not None and task.is_group else None
    seed_libraries()  # tasks such as gpqa shuffle their choices while they are loaded
    _let_nltk_fail()
    try:
        manager = TaskManager(include_path=folder and str(folder), include_defaults=False)
        if folder or task.file is None:
            for name, (kind, file, members) in harness_tasks().entries.items():
                entry = Entry(name=name, kind=Kind[kind], yaml_path=file and task_folder() / file, tags=set(members))
                manager.task_index.setdefault(name, entry)
        found: dict[str, Any] = manager.load([task.name if folder else _task_spec(task, settings)])
    except TunebookError:
        raise
    except Exception as error:  # a task's own functions and templates may raise anything
        if is_disk_full(error):
            raise
        raise _load_error(task, error) from error
    return found


def _let_nltk_fail() -> None:
    """Have nltk raise if it cannot download: tasks would continue, and fail once all answers are generated."""
    if not find_spec("nltk"):
        return
    import nltk

    def download(package: str) -> None:
        try:
            nltk.downloader.download(package, quiet=True, raise_on_error=True)
        except (ValueError, OSError) as error:
            raise ConnectionError(f"nltk's {package}: {first_line(error)}") from error

    nltk.download = download


def _load_error(task: Task, error: Exception) -> RequestError:
    """Return the error of a task that cannot be loaded, with what to type."""
    is_known = task.file is None or task.file in book_task_files().values()
    name = task.name if is_known else str(task.file)
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        return RequestError(
            f"task {name} needs the Python package {error.name}, which is not installed here; type: pip install "
            f"{error.name.partition('.')[0]} (in a container: add it to the image's lock)",
            problem_id="task-package-missing",
        )
    if isinstance(error, ConnectionError | FileNotFoundError) or str(error).startswith(_NO_CACHE):
        problems = f"; or name a local file with its problems: {name}@FILE" if is_known and task.code else ""
        return RequestError(
            f"the data of task {name} is not on this machine and cannot be fetched ({_reason(error)}); with a "
            f"network, type: tunebook fetch tasks={name}{problems}",
            problem_id="task-data-missing",
        )
    return RequestError(f"lm-evaluation-harness refuses task {name}: {_reason(error)}", problem_id="task-file")


def _reason(error: Exception) -> str:
    """Return the first line of an error; with the type for a KeyError, whose message is only the key."""
    return f"KeyError: {error}" if isinstance(error, KeyError) else first_line(error)


def seed_libraries() -> None:
    """Seed the libraries as the harness does at the start of an evaluation."""
    import numpy
    import torch

    random.seed(SEEDS["python"])
    numpy.random.seed(SEEDS["numpy"])
    torch.manual_seed(SEEDS["torch"])


def _set_fewshot(task: Any, num_fewshot: int | None) -> None:
    """Set the number of examples before the prompts depend on it, as the harness does later, unless the task sets 0."""
    own = task.get_config("num_fewshot")
    if num_fewshot is None and own is None:
        task.set_config(key="num_fewshot", value=0)
    elif num_fewshot is not None and own != 0:
        task.set_config(key="num_fewshot", value=num_fewshot)


def has_template(loaded: LoadedTask, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the harness should apply the chat template to the prompts."""
    return not loaded.is_rendered and tokenizer.chat_template is not None


def require_system_prompt(tokenizer: PreTrainedTokenizerBase, system_prompt: str | None) -> None:
    """Refuse a system prompt that the template omits: the harness would continue without it. Raises: DataError."""
    from tunebook.data.conversation import Conversation
    from tunebook.data.template import ConversationRenderer

    if system_prompt is not None:
        talk = [{"role": "system", "content": system_prompt}, {"role": "user", "content": "a question"}]
        ConversationRenderer(tokenizer).prompt(Conversation.plain(talk))


def chat_template(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the harness' function from messages to a prompt, without a model."""
    from types import SimpleNamespace

    from lm_eval.models.huggingface import HFLM

    stand_in = SimpleNamespace(tokenizer=tokenizer, chat_template_args={})
    return lambda *arguments, **options: HFLM.apply_chat_template(stand_in, *arguments, **options)


def _source_hash(file: Path | None) -> str | None:
    """Hash a task file and the YAML and Python files next to it, which it may use."""
    if file is None:
        return None
    beside = [file for file in sorted(file.parent.iterdir()) if file.suffix in (".yaml", ".yml", ".py")]
    return sha256_text("".join(f"{file.name} {sha256_file(file)}\n" for file in beside))


@contextmanager
def _without_environment_report() -> Iterator[None]:
    """Keep the harness from running git, and `pip list` for two seconds: the manifest has both results."""
    from lm_eval import evaluator

    originals = evaluator.add_env_info, evaluator.get_git_commit_hash
    evaluator.add_env_info, evaluator.get_git_commit_hash = lambda storage: None, lambda: None
    try:
        yield
    finally:
        evaluator.add_env_info, evaluator.get_git_commit_hash = originals


def _task_spec(task: Task, settings: HarnessSettings) -> dict[str, Any] | str:
    """Return what the harness loads: a task name, or a task's settings."""
    from lm_eval.tasks._yaml_loader import load_yaml

    if task.file is None:
        return task.name
    config: dict[str, Any] = load_yaml(task.file)
    if task.code is not None:
        check_context(task.name, task.code, max_gen_toks=settings.max_gen_toks, max_length=settings.max_length)
        return config | task.code.harness_keys(settings.cache_folder)
    if task.conversations is None:
        return config
    data_file = _render(task, config, settings)
    return config | {
        "dataset_path": "json",
        "dataset_name": None,
        "test_split": "test",
        "dataset_kwargs": {"data_files": {"test": str(data_file)}, "cache_dir": str(settings.cache_folder)},
    }


def _render(task: Task, config: dict[str, Any], settings: HarnessSettings) -> Path:
    """Render the task's held-out conversations as this model's prompts; return the file."""
    assert task.conversations is not None
    items = render_conversations(task.conversations, settings.system_prompt, settings.tokenizer)
    max_gen_tokens = (config.get("generation_kwargs") or {}).get("max_gen_toks", settings.max_gen_toks)
    check_prompt_lengths(items, settings.tokenizer, settings.max_length - max_gen_tokens)
    file = settings.items_folder / f"{task.name}-prompts.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    # Atomically: two evaluations of one run may run at the same time.
    atomic_write_text(file, "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items))
    return file


def render_conversations(
    file: Path, system_prompt: str | None, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, str]]:
    """Render documents with the keys `prompt`, `answer` (a conversation's last turn) and `task` (its group).

    The answer of a turn that calls tools is JSON text: a list of {name, arguments}. The conversations may have any
    trainable format. As in training, `system_prompt` is added to those without one. Raises: DataError with every
    problem.
    """
    from tunebook.data.template import ConversationRenderer

    problems = DocumentProblems(str(file))
    normalizer = Normalizer(Format.auto, FormatSettings(system_prompt=system_prompt))
    conversations = []
    for number, record in read_records(file, problems, normalizer.account):
        try:
            conversations.append((_answered(normalizer.row(record)), str(record.get(GROUP_KEY, UNGROUPED))))
        except DocumentError as error:
            problems.add(number, error)
    problems.num_documents = len(conversations)
    problems.raise_if_any()
    if not conversations:
        raise DataError(
            f"{file} holds no conversation, so there is nothing to evaluate on", problem_id="data-file-empty"
        )
    renderer = ConversationRenderer(tokenizer)
    return [
        {
            "prompt": renderer.prompt(talk.until(len(talk.messages) - 1)),
            "answer": _answer(talk.messages[-1]),
            "task": group,
        }
        for talk, group in conversations
    ]


def _answered(row: dict[str, Any]) -> Conversation:
    """The conversation of a row whose last turn is the expected answer. Raises: DocumentError."""
    from tunebook.data.conversation import Conversation

    if not row.get("messages"):
        raise DocumentError("it is not a conversation; write it as ShareGPT or messages")
    talk = Conversation.of(row)
    last = talk.messages[-1]
    if last["role"] != "assistant":
        raise DocumentError("it must end with the assistant's turn, which is the expected answer")
    return talk


def _answer(turn: dict[str, Any]) -> str:
    calls = [call["function"] for call in turn.get("tool_calls", ())]
    text: str = json.dumps(calls, ensure_ascii=False) if calls else turn["content"]
    return text


def check_prompt_lengths(
    items: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int
) -> None:
    """Refuse prompts that the harness would truncate at the start to leave space for the answer. Raises: DataError."""
    encoded = tokenizer([item["prompt"] for item in items], add_special_tokens=False)["input_ids"]
    lengths = [len(tokens) for tokens in encoded]
    num_long = sum(length > max_prompt_tokens for length in lengths)
    if num_long:
        raise DataError(
            f"{num_long} of {len(items)} held-out prompts are longer than the {max_prompt_tokens} tokens that the "
            f"model's context leaves for them (the longest has {max(lengths)}), and the harness would cut off their "
            "beginning; shorten them, or lower generation_kwargs.max_gen_toks in the task's file",
            problem_id="heldout-too-long",
        )
