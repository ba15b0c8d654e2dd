"""What the terminal says of compilations that take long in silence."""

import pytest

from tunebook.config.compose import compose
from tunebook.facts.compiling import compilation_notice
from tunebook.hardware.detect import Machine
from tunebook.plan.auto.resolve import resolve_auto

NO_GPU = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0)


def config_of(*overrides):
    return resolve_auto(compose("quickstart", list(overrides)).config, NO_GPU).config


def test_a_run_that_compiles_nothing_says_nothing():
    assert compilation_notice(config_of()) is None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.compile_layers=true", "torch.compile the model's blocks (8 to 98 s on an H200, longer on a CPU)"),
        ("attention=flash_attention_4", "flash-attn 4 a kernel for each new shape"),
        ("attention=varlen_attention_4", "flash-attn 4 a kernel for each new shape"),
        ("attention=flex_attention", "torch.compile the attention"),
        ("model.liger_kernel=true", "Triton the kernels of Liger"),
    ],
)
def test_what_is_compiled_is_named_with_where_it_is_kept(monkeypatch, override, said):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/scratch/kernels")
    notice = compilation_notice(config_of(override))
    assert notice.startswith(f"the first steps compile, in silence: {said}")
    assert notice.endswith(". Kept in /scratch/kernels for the next run")


def test_without_a_setting_it_is_torchs_own_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert f"Kept in {tmp_path}/torchinductor_" in compilation_notice(config_of("model.compile_layers=true"))
