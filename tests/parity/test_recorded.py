"""The recorded GPU runs are within parity's tolerances and describe themselves."""

import json

import pytest

from tunebook.record.losses import FP32_TOLERANCE, LOW_PRECISION_TOLERANCE, compare_losses

NUM_STEPS = 50


RESULTS = "tests/bench/results"


@pytest.fixture(scope="module")
def recorded(project_root):
    lines = (project_root / RESULTS / "h200x4_parity.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def on_two(project_root):
    lines = (project_root / RESULTS / "h200x2_parity.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def on_two_h100(project_root):
    lines = (project_root / RESULTS / "h100x2_parity.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


SHARDED = {"ddp", "zero2", "zero3", "fsdp", "hsdp", "zero2_offload", "zero3_offload", "fsdp_offload"}


@pytest.mark.parametrize(
    ("series", "tolerance", "more"),
    [
        ("fp32", FP32_TOLERANCE, {"zero1", "fsdp_grad_op", "fsdp_by_size", "zero3_nvme"}),
        ("bf16", LOW_PRECISION_TOLERANCE, {"zero1", "fsdp_grad_op", "fsdp_by_size"}),
        ("bf16_quickstart", LOW_PRECISION_TOLERANCE, {"zero3_nvme"}),
    ],
)
def test_every_strategy_has_the_losses_of_one_gpu(recorded, series, tolerance, more):
    runs = {line["name"]: line for line in recorded if line["series"] == series}
    reference = runs.pop("single")["losses"]
    assert len(reference) == NUM_STEPS
    assert set(runs) >= SHARDED | more
    for name, run in runs.items():
        difference = compare_losses(run["losses"], reference[: run["steps_run"]])
        assert difference.largest <= tolerance, name
        assert difference.largest == pytest.approx(run["largest_difference"], rel=0.01, abs=2e-7)
        assert run["steps_run"] == NUM_STEPS or f"after {run['steps_run']} of 50 steps" in run["ended"]


@pytest.mark.parametrize(
    ("series", "tolerance"), [("fp32", FP32_TOLERANCE), ("bf16_quickstart", LOW_PRECISION_TOLERANCE)]
)
def test_on_two_gpus_and_on_one_of_them_too(on_two, series, tolerance):
    runs = {line["name"]: line for line in on_two if line["series"].removesuffix("_fewer") == series}
    reference = runs.pop("single")["losses"]
    alone = {"zero2", "zero3", "fsdp", "zero2_offload", "zero3_offload", "fsdp_offload"}
    assert set(runs) == {
        *(SHARDED - {"hsdp"}),
        "zero1",
        "fsdp_grad_op",
        "fsdp_by_size",
        *(f"{name}_alone" for name in alone),
    }
    for name, run in runs.items():
        assert run["gpus"] == (1 if name.endswith("_alone") else 2)
        assert len(run["losses"]) == len(reference) == NUM_STEPS
        difference = compare_losses(run["losses"], reference)
        assert difference.largest <= tolerance, name
        assert difference.largest == pytest.approx(run["largest_difference"], rel=0.01, abs=2e-7)


def test_two_layers_of_the_3b_model_on_two_gpus(on_two):
    """Those that move parameters or optimizer to the host were cut by time, after 17 to 44 steps."""
    runs = {line["name"]: line for line in on_two if line["series"] == "bf16_3b"}
    reference = runs.pop("single")["losses"]
    assert set(runs) == {*(SHARDED - {"hsdp"}), "zero1", "fsdp_grad_op"}
    for name, run in runs.items():
        assert run["gpus"] == 2
        assert compare_losses(run["losses"], reference[: run["steps_run"]]).largest <= LOW_PRECISION_TOLERANCE, name
        assert run["steps_run"] == NUM_STEPS or (name.endswith("_offload") and run["steps_run"] >= 17)


def test_compiled_blocks_have_the_losses_of_sdpa_under_a_mask(recorded):
    """Qwen2.5-0.5B; the slower way was stopped after 53 of 200 steps, which the others are compared in."""
    runs = {line["name"]: line for line in recorded if line["series"] == "compiled"}
    reference = runs.pop("single")["losses"]
    assert len(reference) == 53
    largest = {}
    for name, run in runs.items():
        difference = compare_losses(run["losses"][:53], reference)
        assert difference.largest <= LOW_PRECISION_TOLERANCE
        assert difference.largest == pytest.approx(run["largest_difference"], rel=0.01)
        largest[name] = difference.largest
    assert largest["varlen"] < largest["compiled"] < 3e-4 < largest["fsdp_compiled"]


def test_compiled_blocks_on_four_gpus_have_the_losses_of_sdpa(recorded):
    """The whole 50 steps, with the size of a head known to the compiler under FSDP."""
    runs = {line["name"]: line for line in recorded if line["series"] == "compiled_spread"}
    reference = runs.pop("single")["losses"]
    assert set(runs) == {"compiled", "ddp_compiled", "zero2_compiled", "fsdp_compiled"}
    for name, run in runs.items():
        assert len(run["losses"]) == len(reference) == NUM_STEPS
        largest = compare_losses(run["losses"], reference).largest
        assert largest == pytest.approx(run["largest_difference"], rel=0.01)
        assert largest < (3e-4 if name == "fsdp_compiled" else 2.1e-4)


def test_the_heads_gradients_made_in_the_forward_pass_give_upstreams_losses(on_two):
    """All were stopped when their time was up, after 28 steps of the reference; it differs from itself by as much."""
    runs = {line["name"]: line for line in on_two if line["series"] == "one_pass"}
    reference = runs.pop("single")["losses"]
    assert len(reference) == 28
    spread = {"ddp", "zero2", "zero3", "fsdp", "fsdp_grad_op", "zero3_offload"}
    assert set(runs) == {"again", "one_pass", *(f"{name}_one_pass" for name in spread)}
    steps = {name: run["compared_steps"] for name, run in runs.items() if run["compared_steps"] < 28}
    assert steps == {"zero3_one_pass": 13, "zero3_offload_one_pass": 8}
    largest = {}
    for name, run in runs.items():
        compared = run["compared_steps"]
        largest[name] = compare_losses(run["losses"][:compared], reference[:compared]).largest
        assert largest[name] == pytest.approx(run["largest_difference"], rel=0.01)
        assert largest[name] < 2.1e-4, name
    assert largest["one_pass"] < largest["again"] < largest["ddp_one_pass"] * 1.1 < 3e-5


def test_flash_attention_4_document_by_document_has_the_losses_of_sdpas_mask(on_two):
    """Qwen2.5-0.5B on one GPU; the slower way was stopped after 45 of 50 steps."""
    runs = {line["name"]: line for line in on_two if line["series"] == "flash_4"}
    reference = runs.pop("single")["losses"]
    assert {name: len(run["losses"]) for name, run in runs.items()} == {"flash_4": 50, "flash_4_compiled": 50}
    for name, run in runs.items():
        largest = compare_losses(run["losses"][:45], reference).largest
        assert largest == pytest.approx(run["largest_difference"], rel=0.01)
        assert largest < (1.7e-4 if name == "flash_4_compiled" else 7.2e-5)


def test_fp16_is_the_same_with_ddp_and_every_fsdp(on_two_h100):
    """Qwen2.5-0.5B on two GPUs. What was run for 8 steps has another learning rate from its fourth on.

    Before, FSDP's loss was rounded to fp16, and offloaded it divided some gradients by what was no scale.
    """
    runs = {line["name"]: line for line in on_two_h100 if line["series"] == "fp16"}
    ddp, first = runs["ddp"], 3
    for name in ("single", "fp32", "fsdp_cast", "fsdp", "fsdp_grad_op", "fsdp_offload"):
        assert compare_losses(runs[name]["losses"][:first], ddp["losses"][:first]).largest < 1.2e-5, name
        assert runs[name]["grad_norms"][:first] == pytest.approx(ddp["grad_norms"][:first], rel=7e-5), name
    for name in ("fsdp_grad_op", "fsdp_offload"):
        steps = runs[name]["steps_run"]
        assert compare_losses(runs[name]["losses"], runs["fsdp"]["losses"][:steps]).largest < 3e-6
    assert [runs[name]["steps_compared"] for name in ("single", "fsdp_cast")] == [13, 17]
    assert runs["single"]["largest_difference"] < 2e-6 < runs["fsdp_cast"]["largest_difference"] < 4.1e-5
    before, offloaded = runs["fsdp_before"], runs["fsdp_offload_before"]
    assert before["losses"][0] == pytest.approx(ddp["losses"][0] - 6.7e-4, abs=5e-5)
    assert offloaded["grad_norms"][0] == pytest.approx(0.978 * ddp["grad_norms"][0], rel=1e-3)


def test_zero_casts_fp16_itself_and_differs_most_in_its_first_steps(on_two_h100):
    """By 0.3% at the fifth step, and within 0.05% from the ninth on: it begins with random weights rounded to fp16."""
    runs = {line["name"]: line["losses"] for line in on_two_h100 if line["series"] == "fp16"}
    for name in ("zero1", "zero2"):
        steps = len(runs[name])
        assert steps >= 22
        far = [abs(one / other - 1) for one, other in zip(runs[name], runs["ddp"][:steps], strict=True)]
        assert max(far) == far[4] == pytest.approx(0.00295, abs=1e-5)
        assert max(far[8:]) < 5e-4


def test_zero_3_and_an_offloaded_optimizer_round_fp16_alike(on_two_h100):
    """For ten steps of 16, at whose learning rates ZeRO-2 was not run: until these differ it has the same losses."""
    runs = {line["name"]: line["losses"] for line in on_two_h100 if line["series"] == "fp16_16_steps"}
    assert compare_losses(runs["zero3"], runs["zero2_offload"][:10]).largest < 2.9e-5
    [of_zero2] = [line["losses"] for line in on_two_h100 if (line["series"], line["name"]) == ("fp16", "zero2")]
    for losses in runs.values():
        assert compare_losses(losses[:3], of_zero2[:3]).largest < 2.5e-5


def test_offloaded_activations_change_no_loss(on_two_h100):
    """Qwen2.5-0.5B on two GPUs in bf16, of whose kernels some sum in any order; and less is held."""
    runs = {line["name"]: line for line in on_two_h100 if line["series"] == "offloaded"}
    reference = runs["single"]["losses"]
    assert set(runs) >= {f"{name}_away" for name in ("single", "ddp", "zero1", "zero2", "zero3", "fsdp")}
    for run in runs.values():
        assert compare_losses(run["losses"], reference[: run["steps_run"]]).largest < 1.2e-4
    for name, at_most in (("single", 1.7e-5), ("zero2", 1.3e-5), ("fsdp", 1e-5)):
        there, away = runs[name], runs[f"{name}_away"]
        steps = min(there["steps_run"], away["steps_run"])
        assert steps >= 7
        assert compare_losses(away["losses"][:steps], there["losses"][:steps]).largest < at_most
        assert max(away["memory_gib"]) < 0.8 * max(there["memory_gib"])


def test_fp8_over_200_steps(recorded):
    """With a scale for each row within 0.55% of bf16; with one for each tensor 16 steps, where it fell, over 1%."""
    runs = {line["name"]: line["losses"] for line in recorded if line["series"] == "fp8_3b"}
    reference = runs.pop("single")
    assert {name: len(losses) for name, losses in runs.items()} == {"fp8_tensorwise": 200, "fp8_rowwise": 200}
    assert compare_losses(runs["fp8_rowwise"], reference).largest == pytest.approx(0.00545, abs=1e-5)
    by_tensor = [abs(one / other - 1) for one, other in zip(runs["fp8_tensorwise"], reference, strict=True)]
    assert max(by_tensor) == pytest.approx(0.01416, abs=1e-5)
    assert [step for step, far in enumerate(by_tensor, 1) if far > 0.01] == [*range(32, 47), 48]
    assert max(by_tensor[-50:]) == pytest.approx(0.0025, abs=1e-4)


def test_fp8_is_near_bf16(on_two):
    """12 layers of the 3B model: the difference grows to 1.2% at step 37 of 50, and is 0.9% at the end."""
    runs = {line["name"]: line["losses"] for line in on_two if line["series"] == "fp8_3b"}
    reference, fp8 = runs["single"], runs["fp8_tensorwise"]
    difference = compare_losses(fp8, reference)
    assert (difference.largest, difference.at_step) == (pytest.approx(0.0117, abs=1e-4), 37)
    assert fp8[-1] / reference[-1] - 1 == pytest.approx(0.0088, abs=1e-4)


def test_most_configurations_are_complete_in_a_bf16_series(recorded):
    """All but FSDP by size, and those that offload parameters to the host, of which 32 and 33 steps are there."""
    whole = {line["name"] for line in recorded if line["series"].startswith("bf16") and line["steps_run"] == NUM_STEPS}
    assert {"ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp_grad_op", "hsdp", "zero2_offload", "zero3_nvme"} <= whole
    steps = {line["name"]: line["steps_run"] for line in recorded if line["series"] == "bf16_quickstart"}
    assert (steps["zero3_offload"], steps["fsdp_offload"]) == (32, 33)


def test_recorded_wrapper_is_that_of_the_name(recorded, on_two, on_two_h100):
    for line in [*recorded, *on_two, *on_two_h100]:
        if line["series"] == "flash_4":
            continue  # on one GPU, and only their losses were kept
        strategy = next(word.partition("=")[2] for word in line["overrides"] if word.startswith("parallelism="))
        found = line["parallelism_found"]
        assert strategy.startswith(found["strategy"]), line["name"]
        # Of 12 blocks five layers each, or the two of the feed-forward network that are wide enough for scales by row.
        layers = 24 if "precision.fp8_scaling=rowwise" in line["overrides"] else 60
        assert ("precision=fp8" in line["overrides"]) == (found.get("fp8_layers") == layers)
        assert found["ranks"] == line["gpus"]
        if strategy.endswith("_offload"):
            assert "cpu" in (found["offload_parameters"], found.get("offload_optimizer"))


def test_casting_costs_zero_2_more_loss_than_it_gains_speed(recorded):
    """Why parallelism.mixed_precision=autocast is the default."""
    runs = {line["name"]: line for line in recorded if line["series"] == "speed"}
    speeds = [runs[name]["tokens_per_second_per_gpu"] for name in ("zero2", "zero2_cast")]
    assert speeds[1] / speeds[0] == pytest.approx(1.13, abs=0.01)
    assert runs["zero2_cast"]["losses"][-1] > 1.15 * runs["zero2"]["losses"][-1]
    assert runs["fsdp"]["losses"][-1] == pytest.approx(runs["zero2"]["losses"][-1], rel=1e-3)


def test_every_line_says_what_it_was_run_on(recorded, on_two, on_two_h100):
    for line in [*recorded, *on_two, *on_two_h100]:
        assert {"date", "hardware", "torch", "transformers", "deepspeed", "weights", "data"} <= set(line)
        assert line["weights"] == "random"
