"""Composing: the precedence of values, and the error for each wrong override."""

import re
import shutil

import pytest

from tunebook.config.book import book_root
from tunebook.config.choices import Strategy
from tunebook.config.compose import compose
from tunebook.config.frozen import config_to_yaml, load_config
from tunebook.config.launchers import SlurmConfig
from tunebook.config.schema import FsdpConfig, ZeroConfig
from tunebook.errors import RequestError


def composed(*words, recipe="qwen3b_zero2", recipes_dirs=()):
    return compose(recipe, list(words), list(recipes_dirs)).config


def test_a_choice_on_the_command_line_beats_the_recipe():
    config = composed("parallelism=zero3")
    assert config.parallelism.strategy is Strategy.zero3
    assert isinstance(config.parallelism, ZeroConfig)


def test_a_value_on_the_command_line_beats_the_recipe_and_the_last_one_counts():
    assert composed("optimizer.learning_rate=1e-2", "optimizer.learning_rate=3e-4").optimizer.learning_rate == 3e-4


@pytest.mark.parametrize(
    ("words", "rate"),
    [([], 2e-5), (["peft=lora"], 2e-4), (["peft=qlora"], 2e-4), (["peft=lora", "method=dpo"], 1e-6),
     (["peft=lora", "optimizer.learning_rate=3e-4"], 3e-4)],
)  # fmt: skip
def test_the_learning_rate_that_none_names_is_that_of_what_is_trained(words: list[str], rate: float) -> None:
    assert compose(None, words).config.optimizer.learning_rate == rate


@pytest.mark.parametrize("name", ["a b", "größe_1", "${a}", "null"])
def test_a_recipe_goes_by_any_name_of_a_file(name, tmp_path):
    (tmp_path / f"{name}.yaml").write_text("# @package _global_\ndefaults: [quickstart, _self_]\ntitle: mine\n")
    assert composed(recipe=name, recipes_dirs=[tmp_path]).title == "mine"


@pytest.mark.parametrize(
    ("typed", "name", "path"),
    [
        ("qwen3_06b", "Qwen/Qwen3-0.6B", None),  # of the book
        ("org/model-1.5B", "org/model-1.5B", None),
        ("mine", None, "mine"),  # a folder
        ("./mine/", None, "./mine/"),
    ],
)
def test_a_model_is_a_name_of_the_book_a_name_of_the_hub_or_a_folder(typed, name, path, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    recipe = f"defaults: [quickstart, {{override /model: {typed}}}, _self_]\nmodel: {{weights: pretrained}}\n"
    (tmp_path / "own.yaml").write_text(recipe)
    for config in (composed(f"model={typed}"), composed(recipe="own.yaml")):
        assert (config.model.name, config.model.path) == (name, path)
    assert composed("model=quickstart", recipe="own.yaml").model.path == "book:recipes/quickstart/model"


@pytest.mark.parametrize("typed", ["gpt2", "./not_here", "hub"])
def test_another_word_is_no_model(typed):
    with pytest.raises(RequestError) as raised:
        composed(f"model={typed}")
    assert raised.value.problem_id == "unknown-choice"


def test_a_choice_brings_its_own_keys():
    assert isinstance(composed("parallelism=fsdp").parallelism, FsdpConfig)
    launcher = composed("launcher=slurm", "launcher.partition=long").launcher
    assert isinstance(launcher, SlurmConfig)
    assert launcher.partition == "long"


@pytest.mark.parametrize(
    ("word", "problem_id", "said"),
    [
        ("training.max_lenght=3", "unknown-key", "Did you mean 'training.max_length'?"),
        ("modle=quickstart", "unknown-key", "Did you mean 'model'?"),
        ("seed=3", "unknown-key", "type training.seed=3"),
        ("parallelism=zero4", "unknown-choice", "Did you mean 'zero3'?"),
        ("training.max_length=abc", "wrong-type", "training.max_length: "),
        ("precision.compute=bf17", "wrong-type", "Did you mean 'bf16'?"),
        ("precision.compute=[bf16]", "wrong-type", "one value, not a list"),
        ("method=ipo", "unknown-choice", "type method=dpo method.loss_type=ipo"),
        ("training=4", "wrong-type", "4"),
        ("evaluation.tasks=abc", "wrong-type", "a list is typed [a,b]"),
        ("dataset.parts.chat=a.jsonl", "wrong-type", "dataset.parts.chat: "),
        ("peft.rank_pattern={q_proj: wide}", "wrong-type", "peft.rank_pattern.q_proj: "),
        ("title=${training.sed}", "wrong-type", "Did you mean 'training.seed'?"),
        ("training.seed", "override-form", "such as training.seed=1"),
        ("optimizer.learning_rate=1e-4,1e-5", "override-form", "tunebook sweep"),
        ("title=a, b", "override-form", "type 'title=\"a, b\"'"),
        ("+training.seed=1", "override-form", "type training.seed=1"),
        ("+dataset.parts.a.path=a.jsonl", "override-form", "type dataset.parts.a.path=a.jsonl"),
        ("recipe=quickstart", "override-form", "tunebook train quickstart"),
        ("peft.target_modules=[q_proj", "override-form", "brackets"),
        ("=", "override-form", "key=value without spaces"),
    ],
)
def test_a_wrong_word_is_named_with_what_to_type(word, problem_id, said):
    with pytest.raises(RequestError) as caught:
        composed(word)
    assert (caught.value.exit_code, caught.value.problem_id) == (2, problem_id)
    assert word in caught.value.message
    assert said in caught.value.message


@pytest.mark.parametrize("value", ["<|im_end|>", "a=b", "50% or more?", "x\\y*", "it's"])
def test_a_text_is_taken_as_typed(value):
    assert composed(f"model.pad_token={value}").model.pad_token == value


def test_entries_of_a_list_are_taken_as_typed():
    config = composed("launcher=slurm", "launcher.extra_args=[--nodes=3,--mem=4G,plain]")
    assert config.launcher.extra_args == ["--nodes=3", "--mem=4G", "plain"]


def test_every_wrong_override_is_named():
    with pytest.raises(RequestError) as caught:
        composed("training.seed=abc", "optimzer.learning_rate=3e-4", "precision.compute=bf17", "title=ok")
    headline, *problems = caught.value.message.splitlines()
    assert headline == "3 problems"
    for said in ("'training.seed=abc'", "type optimizer.learning_rate=3e-4", "'precision.compute=bf17'"):
        assert sum(said in problem for problem in problems) == 1


def test_a_key_of_another_choice_says_which():
    with pytest.raises(RequestError, match="has no meaning with parallelism=ddp; it belongs to parallelism=zero1"):
        composed("parallelism=ddp", "parallelism.overlap_comm=true")
    with pytest.raises(RequestError, match=r"=local; it belongs to launcher=ray$"):
        composed("launcher=local", "launcher.cpus_per_worker=2")


def test_missing_values_are_all_named():
    with pytest.raises(RequestError) as caught:
        composed("evaluation=tasks", "optimizer.learning_rate=???")
    assert caught.value.problem_id == "missing-value"
    assert caught.value.message.splitlines()[1:] == ["  evaluation.tasks=VALUE", "  optimizer.learning_rate=VALUE"]


def test_names_of_a_mapping_are_added_and_an_empty_one_removes_them():
    lora, one = "peft=lora", "peft.rank_pattern={q_proj: 32}"
    assert composed(lora, one, "peft.rank_pattern.down_proj=4").peft.rank_pattern == {"q_proj": 32, "down_proj": 4}
    assert composed(lora, one, "peft.rank_pattern={}").peft.rank_pattern == {}
    assert list(composed("dataset=mixture", "dataset.parts.chat={}").dataset.parts) == ["chat"]
    assert composed("model.facts.config={head_dim: 64}").model.facts.config == {"head_dim": 64}


def test_a_model_may_be_named_by_its_keys_alone():
    model = composed("model.name=a/b", recipe=None).model
    assert (model.name, model.path) == ("a/b", None)


def test_mixture_parts_are_the_users_own_names():
    parts = composed("dataset=mixture", "dataset.parts.chat.path=a.jsonl", "dataset.parts.chat.weight=2").dataset.parts
    assert (parts["chat"].path, parts["chat"].weight) == ("a.jsonl", 2.0)
    with pytest.raises(RequestError, match=r"no key 'dataset.parts.chat.pth'. Did you mean 'dataset.parts.chat.path'"):
        composed("dataset=mixture", "dataset.parts.chat.pth=a.jsonl")


@pytest.mark.parametrize(
    "word",
    ["dataset.chat_template_kwargs={enable_thinking:false}", "dataset.chat_template_kwargs.enable_thinking=false"],
)
def test_variables_of_the_chat_template_have_any_name(word: str) -> None:
    more = ["dataset.chat_template_kwargs.today=[1, 2]", "dataset.parts.a.chat_template_kwargs.effort=high"]
    dataset = composed(word, *more, recipe="quickstart").dataset
    assert dataset.chat_template_kwargs == {"enable_thinking": False, "today": [1, 2]}
    assert dataset.parts["a"].chat_template_kwargs == {"effort": "high"}


class TestRecipesOfOnesOwn:
    def test_builds_on_another_by_naming_it(self, tmp_path):
        (tmp_path / "mine.yaml").write_text("defaults: [qwen3b_zero2, _self_]\ntraining: {max_length: 77}\n")
        config = composed(recipe="mine", recipes_dirs=[tmp_path])
        assert (config.training.max_length, config.training.global_samples) == (77, 528)
        assert config.parallelism.strategy is Strategy.zero2

    def test_is_found_in_my_recipes_and_by_its_file(self, tmp_path, monkeypatch):
        (tmp_path / "my_recipes").mkdir()
        (tmp_path / "my_recipes" / "mine.yaml").write_text("defaults: [quickstart, _self_]\ntraining: {seed: 7}\n")
        monkeypatch.chdir(tmp_path)
        assert composed(recipe="mine").training.seed == 7
        monkeypatch.chdir("/")
        assert composed(recipe=f"{tmp_path}/my_recipes/mine.yaml").training.seed == 7

    def test_is_found_by_the_variable(self, tmp_path, monkeypatch):
        (tmp_path / "mine.yaml").write_text("training: {max_length: 77}\n")
        monkeypatch.setenv("TUNEBOOK_RECIPES", str(tmp_path))
        assert composed(recipe="mine").training.max_length == 77

    @pytest.mark.parametrize(
        ("text", "problem_id", "said"),
        [
            ("training: {max_lenght: 77}", "unknown-key", "Did you mean 'training.max_length'"),
            ("training: {save_total_limit: 3}", "unknown-key", "type training.keep_checkpoints=3"),
            ("training.seed: 3", "unknown-key", "'training.seed' is written with a dot"),
            ("training: {seed: many}", "wrong-type", "training.seed: "),
            ("defaults: [{override /parallelism: zero4}, _self_]", "unknown-choice", "Did you mean 'zero3'"),
            ("defaults: [{override /paralelism: ddp}, _self_]", "recipe-defaults", "Did you mean 'parallelism'"),
            ("model: qwen25_05b", "recipe-defaults", "'- override /model: qwen25_05b'"),
            ("defaults: [_self_, quickstart]", "recipe-defaults", "end with '- _self_'"),
            ("training: {seed: [1", "recipe-not-yaml", "this is not YAML"),
            ("- a\n- b", "recipe-not-yaml", "a recipe is a mapping"),
        ],
    )
    def test_a_broken_recipe_is_named(self, tmp_path, text, problem_id, said):
        (tmp_path / "mine.yaml").write_text(text + "\n")
        with pytest.raises(RequestError, match=rf"^{tmp_path}/mine.yaml.*{said}") as caught:
            composed(recipe="mine", recipes_dirs=[tmp_path])
        assert caught.value.problem_id == problem_id

    def test_all_wrong_keys_of_a_recipe_are_named(self, tmp_path):
        (tmp_path / "mine.yaml").write_text("lora_r: 8\nseed: 3\ntraining: {max_length: many}\n")
        with pytest.raises(RequestError) as caught:
            composed(recipe="mine", recipes_dirs=[tmp_path])
        for typed in ("peft.rank=8", "training.seed=3", "training.max_length: "):
            assert typed in caught.value.message

    @pytest.mark.parametrize(
        ("parent", "problem_id", "said"),
        [
            ("qwen3b_zero", "unknown-recipe", "Did you mean 'qwen3b_zero2'"),
            ("tatsu-lab/alpaca", "unknown-recipe", "dataset=hub dataset.name=tatsu-lab/alpaca"),
            ("mine", "recipe-circle", "recipe 'mine' builds on itself: mine -> mine"),
        ],
    )
    def test_a_recipe_that_it_cannot_build_on_is_named(self, tmp_path, parent, problem_id, said):
        (tmp_path / "mine.yaml").write_text(f"defaults: [{parent}, _self_]\n")
        with pytest.raises(RequestError, match=re.escape(said)) as caught:
            composed(recipe="mine", recipes_dirs=[tmp_path])
        assert caught.value.problem_id == problem_id

    def test_of_two_parents_the_later_one_sets_a_value_and_a_choice(self, tmp_path):
        for name, text in (
            ("base", "training: {seed: 0, max_length: 5}"),
            ("one", "defaults: [base, {override /peft: qlora}]\ntraining: {seed: 1, max_length: 6}"),
            ("two", "defaults: [base, {override /peft: lora}]\ntraining: {seed: 2}"),
            ("mine", "defaults: [quickstart, one, two, _self_]"),
        ):
            (tmp_path / f"{name}.yaml").write_text(text + "\n")
        composition = compose("mine", [], [tmp_path])
        training = composition.config.training
        assert (training.seed, training.max_length, composition.groups["peft"]) == (2, 6, "lora")
        assert composition.set_by("training.seed") == str(tmp_path / "two.yaml")

    def test_a_name_of_the_books_is_refused(self, tmp_path):
        (tmp_path / "quickstart.yaml").write_text("training: {seed: 1}\n")
        with pytest.raises(RequestError, match="two recipes are called 'quickstart'"):
            composed(recipe="quickstart", recipes_dirs=[tmp_path])

    def test_a_missing_folder_is_named(self, tmp_path):
        with pytest.raises(RequestError, match=f"--recipes-dir {tmp_path}/nix"):
            composed(recipe="quickstart", recipes_dirs=[tmp_path / "nix"])


def test_a_wrong_file_of_a_group_is_named(tmp_path, monkeypatch):
    shutil.copytree(book_root() / "hydra_configs", tmp_path / "hydra_configs")
    (tmp_path / "hydra_configs" / "model" / "mine.yaml").write_text("nmae: a/b\n")
    (tmp_path / "recipes").mkdir()
    monkeypatch.setattr("tunebook.config.compose.book_root", lambda: tmp_path)
    monkeypatch.setattr("tunebook.config.recipe_files.book_root", lambda: tmp_path)
    with pytest.raises(RequestError, match=r"In 'model/mine': .*Key 'nmae' not in 'ModelConfig'"):
        compose(None, ["model=mine"])


def test_origins_of_values_and_choices(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [qwen3b_zero2, _self_]\ntraining: {max_length: 77}\n")
    composition = compose("mine", ["training.seed=3", "attention=sdpa"], [tmp_path])
    assert composition.set_by("training.seed") == "override 'training.seed=3'"
    assert composition.set_by("attention.implementation") == "override 'attention=sdpa'"
    assert composition.set_by("training.max_length") == str(tmp_path / "mine.yaml")
    assert (composition.set_by("parallelism.strategy") or "").endswith("recipes/qwen3b_zero2.yaml")
    assert composition.set_by("training.max_grad_norm") is None
    assert composition.set_by("peft.rank") is None


class TestFrozen:
    @pytest.mark.parametrize("recipe", ["llama2_70b_fsdp", "dolly3b_ray_zero3_offload"])
    def test_reads_back_equal(self, recipe, tmp_path):
        config = composed(recipe=recipe)
        (tmp_path / "run.yaml").write_text(config_to_yaml(config))
        assert load_config(tmp_path / "run.yaml") == config

    def test_mixtures_too(self, tmp_path):
        config = composed("dataset=mixture", "dataset.parts.a.path=x", "dataset.parts.b.name=y/z")
        (tmp_path / "run.yaml").write_text(config_to_yaml(config))
        assert load_config(tmp_path / "run.yaml") == config

    def test_a_missing_or_edited_file_is_refused(self, tmp_path):
        with pytest.raises(RequestError, match="no run folder"):
            load_config(tmp_path / "run.yaml")
        (tmp_path / "run.yaml").write_text(config_to_yaml(composed()).replace("max_length", "max_lenght"))
        with pytest.raises(RequestError, match="edited by hand or written by another version"):
            load_config(tmp_path / "run.yaml")
