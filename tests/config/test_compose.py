"""Composing: the precedence of values, and the error for each wrong override."""

import re

import pytest

from tunebook.config.choices import Strategy
from tunebook.config.compose import compose
from tunebook.config.frozen import config_to_yaml, load_config
from tunebook.config.schema import FsdpConfig, SlurmConfig, ZeroConfig
from tunebook.errors import RequestError


def composed(*words, recipe="qwen3b_zero2", recipes_dirs=()):
    return compose(recipe, list(words), list(recipes_dirs)).config


def test_a_choice_on_the_command_line_beats_the_recipe():
    config = composed("parallelism=zero3")
    assert config.parallelism.strategy is Strategy.zero3
    assert isinstance(config.parallelism, ZeroConfig)


def test_a_value_on_the_command_line_beats_the_recipe():
    assert composed("optimizer.learning_rate=3e-4").optimizer.learning_rate == 3e-4


@pytest.fixture
def recipe_called(tmp_path):
    def write(name):
        (tmp_path / f"{name}.yaml").write_text("# @package _global_\ndefaults: [quickstart, _self_]\ntitle: mine\n")
        return [tmp_path]

    return write


@pytest.mark.parametrize("name", ["a b", "a-b.2", "a:b", "_1", "a$b", "01"])
def test_a_recipe_goes_by_any_name_that_hydra_reads_as_text(name, recipe_called):
    assert composed(recipe=name, recipes_dirs=recipe_called(name)).title == "mine"


@pytest.mark.parametrize(
    "name", ["größe_1", "a=b", "a(b)", "it's", "a,b", "[a]", "a#b", "~a", "${a}", "a ", "1", "1e3", "null", "true"]
)
def test_another_name_is_to_be_changed(name, recipe_called):
    folders = recipe_called(name)
    with pytest.raises(RequestError) as caught:
        composed(recipe=name, recipes_dirs=folders)
    assert caught.value.problem_id == "recipe-name-form"
    assert caught.value.message.startswith(f"{folders[0] / name}.yaml: Hydra")
    assert f"does not read '{name}' as a name; rename it: letters a-z, digits, _ - ." in caught.value.message


def test_a_choice_brings_its_own_keys():
    assert isinstance(composed("parallelism=fsdp").parallelism, FsdpConfig)
    launcher = composed("launcher=slurm", "launcher.partition=long").launcher
    assert isinstance(launcher, SlurmConfig)
    assert launcher.partition == "long"


def test_a_run_without_a_recipe():
    config = composed("model.name=a/b", "dataset.path=x.jsonl", recipe=None)
    assert (config.model.name, config.recipe, config.parallelism.strategy) == ("a/b", None, Strategy.auto)


@pytest.mark.parametrize(
    ("word", "problem_id", "said"),
    [
        ("training.max_lenght=3", "unknown-key", "Did you mean 'training.max_length'?"),
        ("trainin.max_length=4", "unknown-key", "type training.max_length=4"),
        ("modle=quickstart", "unknown-key", "Did you mean 'model'?"),
        ("seed=3", "unknown-key", "type training.seed=3"),
        ("parallelism=zero4", "unknown-choice", "Did you mean 'zero3'? Choices of parallelism: auto, ddp"),
        ("training.max_length=abc", "wrong-type", "training.max_length=abc is not a whole number"),
        ("training.seed=1.5", "wrong-type", "training.seed=1.5 is not a whole number"),
        ("training.deterministic=maybe", "wrong-type", "is not true or false"),
        ("precision.compute=bf17", "wrong-type", "is not one of auto, fp32, bf16, fp16, fp8. Did you mean 'bf16'?"),
        ("training=4", "wrong-type", "training=4 is not a group of keys"),
        ("training.seed=null", "wrong-type", "training.seed=null is not a whole number"),
        ("evaluation.tasks=abc", "wrong-type", "type 'evaluation.tasks=[abc]'"),
        ("optimizer.learning_rate.x=5", "wrong-type", "is not a number"),
        ("dataset.path=[a,b]", "wrong-type", "dataset.path=[a,b] is not text"),
        ("dataset.parts.chat=a.jsonl", "wrong-type", "is not a group of keys: source, path"),
        ("title=${training.sed}", "wrong-type", "Did you mean 'training.seed'?"),
        ("training.seed", "override-form", "type training.seed=VALUE"),
        ("training.global_samples=1,2", "override-form", "`tunebook sweep` for one run each"),
        ("optimizer.learning_rate=1e-4,1e-5", "override-form", "`tunebook sweep` for one run each"),
        ("evaluation.tasks=a,b", "override-form", "'evaluation.tasks=[a,b]' for a list"),
        ("title=a, b", "override-form", "'title=\"a, b\"' for a text"),
        ("+training.seed=1", "override-form", "type training.seed=1"),
        ("~training.seed", "override-form", "type training.seed=VALUE"),
        ("peft.rank_pattern.q_proj=1,2", "override-form", "`tunebook sweep`"),
        ("recipe=quickstart", "override-form", "tunebook train quickstart"),
        ("hydra.run.dir=x", "override-form", "type outputs=x"),
        ("peft.target_modules=[q_proj", "override-form", "cannot be read"),
        ("title='a", "override-form", "cannot be read"),
        ("=", "override-form", "without spaces round the ="),
    ],
)
def test_a_wrong_word_is_named_with_what_to_type(word, problem_id, said):
    with pytest.raises(RequestError) as caught:
        composed(word)
    assert (caught.value.exit_code, caught.value.problem_id) == (2, problem_id)
    assert word in caught.value.message
    assert said in caught.value.message


@pytest.mark.parametrize("value", ["<pad>", "</s>", "<|im_end|>", "a=b", "50% or more?", "x\\y*", "it's"])
def test_a_text_is_taken_as_typed(value):
    assert composed(f"model.pad_token={value}").model.pad_token == value


def test_every_wrong_override_is_named():
    with pytest.raises(RequestError) as caught:
        composed("training.seed=abc", "optimzer.learning_rate=3", "precision=bf17", "title=ok")
    headline, *problems = caught.value.message.splitlines()
    assert headline == "3 problems"
    for said in ("no precision 'bf17'", "training.seed=abc is not", "type optimizer.learning_rate=3"):
        assert sum(said in problem for problem in problems) == 1


def test_a_key_below_facts_that_are_read_from_the_model():
    with pytest.raises(RequestError, match=r"^override 'model.facts.num_layers=3': model=quickstart takes its facts"):
        composed("model.facts.num_layers=3", recipe="quickstart")


def test_consequences_of_a_wrong_override_are_not_reported():
    with pytest.raises(RequestError, match=r"^override 'parallelism=zero22': there is no parallelism 'zero22'"):
        composed("parallelism=zero22", "parallelism.offload_optimizer=cpu")
    with pytest.raises(RequestError, match=r"^override 'evaluation.taks=\[a\]': there is no key"):
        composed("evaluation=tasks", "evaluation.taks=[a]")


def test_a_key_of_another_choice_says_which():
    with pytest.raises(RequestError, match="has no meaning with parallelism=ddp; it belongs to parallelism=zero1"):
        composed("parallelism=ddp", "parallelism.overlap_comm=true")
    choices = ("fsdp", "fsdp_all_ranks_load", "fsdp_grad_op", "fsdp_offload", "hsdp")
    listed = ", ".join(f"parallelism={choice}" for choice in choices)
    with pytest.raises(RequestError, match=f"=auto; it belongs to {listed}$"):
        composed("parallelism=auto", "parallelism.wrap_classes=[Block]")
    with pytest.raises(RequestError, match=r"=local; it belongs to launcher=ray, launcher=ray_28_cpus$"):
        composed("launcher=local", "launcher.cpus_per_worker=2")


def test_an_unknown_recipe_lists_the_recipes_and_the_nearest():
    with pytest.raises(RequestError, match=r"no recipe 'qwen3b_zero3'\. Did you mean 'qwen3b_zero2'\?.*quickstart"):
        composed(recipe="qwen3b_zero3")


def test_a_recipe_named_by_its_file_says_what_to_type(tmp_path):
    (tmp_path / "mine.yaml").write_text("training: {max_length: 77}\n")
    with pytest.raises(RequestError, match=f"type mine --recipes-dir {tmp_path}$"):
        composed(recipe=str(tmp_path / "mine.yaml"))


def test_missing_values_are_all_named():
    with pytest.raises(RequestError, match=r"evaluation.tasks=VALUE \(a list such as \[a,b\]") as caught:
        composed("evaluation=tasks")
    assert caught.value.problem_id == "missing-value"


def test_names_of_a_mapping_are_added_and_an_empty_one_removes_them():
    lora, one = "peft=lora", "peft.rank_pattern={q_proj: 32}"
    assert composed(lora, one, "peft.rank_pattern.down_proj=4").peft.rank_pattern == {"q_proj": 32, "down_proj": 4}
    assert composed(lora, one, "peft.rank_pattern={}").peft.rank_pattern == {}
    assert composed("peft.rank_pattern={}").peft.rank_pattern == {}
    assert list(composed("dataset=mixture", "dataset.parts.chat={}").dataset.parts) == ["chat"]
    assert composed("model.facts.config={head_dim: 64}").model.facts.config == {"head_dim": 64}


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("peft.rank_pattern={q_proj: wide}", "peft.rank_pattern.q_proj=wide is not a whole number"),
        ("peft.rank_pattern.q_proj={}", "peft.rank_pattern.q_proj={} is not a whole number"),
        ("peft.alpha_pattern.q_proj=[1,2]", "peft.alpha_pattern.q_proj=[1,2] is not a number"),
        ("peft.rank_pattern=[q_proj]", "peft.rank_pattern=[q_proj] is not a mapping of names to a whole number"),
        ("dataset.chat_template_kwargs=[1]", "is not a mapping of names to any value"),
        ("dataset.parts=a.jsonl", "dataset.parts=a.jsonl is not a mapping of names to a group of keys"),
    ],
)
def test_a_value_of_another_form_than_its_mapping_is_named(word, says):
    with pytest.raises(RequestError, match=re.escape(says)):
        composed("peft=lora", word)


def test_mixture_parts_are_the_users_own_names():
    parts = composed("dataset=mixture", "dataset.parts.chat.path=a.jsonl", "dataset.parts.chat.weight=2").dataset.parts
    assert (parts["chat"].path, parts["chat"].weight) == ("a.jsonl", 2.0)
    with pytest.raises(RequestError, match=r"no key 'dataset.parts.chat.pth'. Did you mean 'dataset.parts.chat.path'"):
        composed("dataset=mixture", "dataset.parts.chat.pth=a.jsonl")


class TestRecipesOfOnesOwn:
    def test_builds_on_another_by_naming_it(self, tmp_path):
        (tmp_path / "mine.yaml").write_text("defaults: [qwen3b_zero2, _self_]\ntraining: {max_length: 77}\n")
        config = composed(recipe="mine", recipes_dirs=[tmp_path])
        assert (config.training.max_length, config.training.global_samples) == (77, 528)
        assert config.parallelism.strategy is Strategy.zero2

    def test_is_found_by_the_variable(self, tmp_path, monkeypatch):
        (tmp_path / "mine.yaml").write_text("training: {max_length: 77}\n")
        monkeypatch.setenv("TUNEBOOK_RECIPES", str(tmp_path))
        assert composed(recipe="mine").training.max_length == 77

    def test_a_wrong_key_names_the_file(self, tmp_path):
        (tmp_path / "mine.yaml").write_text("training: {max_lenght: 77}\n")
        with pytest.raises(
            RequestError, match=rf"{tmp_path}/mine.yaml: there is no key.*Did you mean 'training.max_length'"
        ):
            composed(recipe="mine", recipes_dirs=[tmp_path])

    def test_a_wrong_value_names_the_file(self, tmp_path):
        (tmp_path / "mine.yaml").write_text("training: {seed: many}\n")
        with pytest.raises(RequestError, match=rf"{tmp_path}/mine.yaml: training.seed=many is not a whole number"):
            composed(recipe="mine", recipes_dirs=[tmp_path])

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("defaults: [{override /parallelism: zero4}, _self_]", "no parallelism 'zero4'. Did you mean 'zero3'"),
            ("defaults: [{override /paralelism: ddp}, _self_]", "no config group 'paralelism'. Did you mean 'para"),
            ("defaults: [{parallelism: ddp}, _self_]", "write '- override /parallelism: ...' instead"),
            ("defaults: [qwen3b_zero, _self_]", "builds on a recipe 'qwen3b_zero' that is not there"),
            (
                "defaults: [mine, _self_]",
                "recipe 'mine' builds on itself: mine -> mine; remove 'mine' from the defaults",
            ),
            ("defaults: [quickstart, quickstart, _self_]", "'mine' builds on 'quickstart' twice; remove 'quickstart'"),
            ("defaults: quickstart", "its defaults are quickstart, and must be a list, of which each line"),
            ("defaults: {override /parallelism: ddp}", "its defaults are .* and must be a list, of which each line"),
            ("defaults: [quickstart, 3]", r"its defaults are \['quickstart', 3\], and must be a list"),
            ("defaults: [quickstart, null]", "and must be a list, of which each line is the name of a recipe"),
            (
                "defaults: [_self_, quickstart]\ntraining: {seed: 3}",
                "would replace the values of this file; write '- _se",
            ),
            ("training.seed: 3", "'training.seed' is written with a dot.*write 'seed: ...' indented below 'training:'"),
            ("training: 5", "training is a group of keys, .* the value '5'; write its keys indented below 'training:'"),
            ("evaluation: {code: 5}", "evaluation.code is a group of keys, .* write its keys indented below 'code:'"),
            (
                "evaluation: {code.top_p: 1}",
                "'evaluation.code.top_p' is written with a dot.*'top_p: ...' .* below 'code:'",
            ),
            ("model: qwen25_05b", "write '- override /model: qwen25_05b' in its defaults"),
            ("1: 2", "mine.yaml: there is no key '1'"),
            ("training: {seed: [1", r"mine.yaml:\d+: this is not YAML"),
            ("- a\n- b", "a recipe is a mapping"),
        ],
    )
    def test_a_broken_recipe_is_named(self, tmp_path, text, said):
        (tmp_path / "mine.yaml").write_text(text + "\n")
        with pytest.raises(RequestError, match=said):
            composed(recipe="mine", recipes_dirs=[tmp_path])

    def test_of_two_parents_the_later_one_sets_a_value(self, tmp_path):
        for name, text in (
            ("one", "training: {seed: 1}"), ("two", "training: {seed: 2}"),
            ("mine", "defaults: [quickstart, one, two, _self_]"),
        ):  # fmt: skip
            (tmp_path / f"{name}.yaml").write_text(text + "\n")
        composition = compose("mine", [], [tmp_path])
        assert composition.config.training.seed == 2
        assert composition.origins.of("training.seed") == str(tmp_path / "two.yaml")

    def test_a_name_of_the_books_is_refused(self, tmp_path):
        (tmp_path / "quickstart.yaml").write_text("training: {seed: 1}\n")
        with pytest.raises(RequestError, match="two recipes are called 'quickstart'"):
            composed(recipe="quickstart", recipes_dirs=[tmp_path])

    def test_a_missing_folder_is_named(self, tmp_path):
        with pytest.raises(RequestError, match=f"--recipes-dir {tmp_path}/nix"):
            composed(recipe="quickstart", recipes_dirs=[tmp_path / "nix"])

    def test_another_recipes_broken_file_does_not_matter(self, tmp_path):
        (tmp_path / "broken.yaml").write_text("a: [")
        assert composed(recipe="qwen3b_zero2", recipes_dirs=[tmp_path]).training.global_samples == 528


class TestOrigins:
    def test_of_values_and_choices(self, tmp_path):
        (tmp_path / "mine.yaml").write_text("defaults: [qwen3b_zero2, _self_]\ntraining: {max_length: 77}\n")
        origins = compose("mine", ["training.seed=3", "attention=sdpa"], [tmp_path]).origins
        assert origins.set_by("training.seed") == "override 'training.seed=3'"
        assert origins.set_by("attention.implementation") == "override 'attention=sdpa'"
        assert origins.set_by("training.max_length") == str(tmp_path / "mine.yaml")
        assert origins.set_by("training.max_grad_norm") is None
        assert origins.of("training.seed") == "override 'training.seed=3'"
        assert origins.of("training.max_length") == str(tmp_path / "mine.yaml")
        assert origins.of("training.global_samples").endswith("recipes/qwen3b_zero2.yaml")
        assert origins.of("parallelism.strategy").endswith("parallelism/zero2.yaml")
        assert origins.of("peft.rank") == "the default of peft=full"
        assert origins.of_choice("parallelism").endswith("recipes/qwen3b_zero2.yaml")


class TestFrozen:
    @pytest.mark.parametrize("recipe", ["qwen3b_zero2", "llama2_70b_fsdp", "dolly3b_ray_zero3_offload", "quickstart"])
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


@pytest.mark.parametrize(
    "word",
    ["dataset.chat_template_kwargs={enable_thinking:false}", "dataset.chat_template_kwargs.enable_thinking=false"],
)
def test_variables_of_the_chat_template_have_any_name(word: str) -> None:
    more = ["dataset.chat_template_kwargs.today=[1, 2]", "dataset.parts.a.chat_template_kwargs.effort=high"]
    dataset = compose("quickstart", [word, *more]).config.dataset
    assert dataset.chat_template_kwargs == {"enable_thinking": False, "today": [1, 2]}
    assert dataset.parts["a"].chat_template_kwargs == {"effort": "high"}
    with pytest.raises(RequestError, match="chat_template_kwargs=3 is not a mapping of names to any value"):
        compose("quickstart", ["dataset.chat_template_kwargs=3"])
