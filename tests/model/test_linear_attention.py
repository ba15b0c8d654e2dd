"""Layers that carry a state along a packed row, against the same documents one by one."""

from __future__ import annotations

import contextlib
import functools
import itertools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.bamba import modeling_bamba

from tunebook.model import linear_attention
from tunebook.model.linear_attention import by_document, convolve_documents, isolate_documents, packages_for_packing

from .conftest import daily

LENGTHS = (7, 1, 20, 2)
SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
GATED = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 8}
KINDS = {
    "qwen3_next": GATED | EXPERTS,
    "qwen3_5_text": GATED,
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    # Without attention, whose mask lets documents see each other: see `test_granites_attention_...` of the leak probe
    "granitemoehybrid": MAMBA | {"layer_types": ["mamba"] * 2, "num_local_experts": 0, "shared_intermediate_size": 64},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 128, "mamba_d_head": 16},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16,
        "n_groups": 2, "chunk_size": 8,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 8, "mamba_headdim": 16, "mamba_d_state": 16,
        "chunk_size": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}  # fmt: skip
MAMBA_KINDS = ("bamba", "granitemoehybrid", "falcon_h1", "nemotron_h", "zamba2")


def model_of(kind, form=torch.float32):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, **KINDS[kind])
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=form).train()


@pytest.fixture
def isolate():
    """`isolate_documents`, put back afterwards. A test names monkeypatch first, so that what it sets goes last."""
    with contextlib.ExitStack() as stack:
        yield lambda model, **options: stack.callback(isolate_documents(model, **options))


def row_of(documents):
    """The inputs of TRL's collator."""
    lengths = torch.tensor([len(tensor) for tensor in documents])
    ends = torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(torch.int32)
    return {
        "input_ids": torch.cat(documents)[None],
        "position_ids": torch.cat([torch.arange(len(tensor)) for tensor in documents])[None],
        "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 20, "max_length_k": 20,
        "seq_idx": torch.arange(len(documents), dtype=torch.int32).repeat_interleave(lengths)[None],
    }  # fmt: skip


def require_equal_when_packed(model, isolate, *, is_on_cpu, left_out=()):
    """A packed row has the logits and gradients of its documents, also without some inputs of the collator."""
    documents = [torch.randint(2, 120, (length,)) for length in LENGTHS]
    alone = torch.cat([model(input_ids=tensor[None], use_cache=False).logits[0] for tensor in documents])
    (alone**2).mean().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    isolate(model, is_on_cpu=is_on_cpu)
    row = {name: value for name, value in row_of(documents).items() if name not in left_out}
    packed = model(**row, use_cache=False).logits[0]
    (packed**2).mean().backward()
    torch.testing.assert_close(packed, alone, atol=2e-6, rtol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=2e-6, rtol=1e-4, msg=name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", daily(KINDS, "qwen3_5_text", "lfm2"))
def test_a_packed_row_has_the_logits_and_gradients_of_its_documents(isolate, kind):
    require_equal_when_packed(model_of(kind), isolate, is_on_cpu=True)


@pytest.mark.parametrize(("kind", "packages"), [("qwen3_5_text", ["fla-core"]), ("bamba", ["fla-core"]), ("lfm2", [])])
def test_on_a_gpu_only_convolutions_are_replaced(isolate, kind, packages):
    model = model_of(kind)
    assert packages_for_packing(model) == packages
    isolate(model, is_on_cpu=False)
    with pytest.raises(ValueError, match="packed sequences") if packages else contextlib.nullcontext():
        model(**row_of([torch.arange(5), torch.arange(4)]), use_cache=False)


def test_a_convolution_by_hand():
    """A kernel of width 2 that adds the token before to each."""

    def sums(hidden_states, weight, bias, activation):
        return hidden_states + torch.nn.functional.pad(hidden_states, (1, 0))[..., :-1]

    row, weight = torch.tensor([[[1.0, 2.0, 4.0, 8.0]]]), torch.ones(1, 2)
    apart = torch.tensor([[0, 0, 1, 1]], dtype=torch.int32)
    assert convolve_documents(sums, row, weight).tolist() == [[[1, 3, 6, 12]]]
    assert convolve_documents(sums, row, weight, seq_idx=apart).tolist() == [[[1, 3, 4, 12]]]


def test_a_state_by_hand():
    def running_sum(values, *, output_final_state=False):
        return values.cumsum(dim=1), None

    row = torch.tensor([1.0, 2.0, 4.0, 8.0]).reshape(1, 4, 1)
    ends = torch.tensor([0, 1, 4], dtype=torch.int32)
    state, last = by_document("cu_seqlens", running_sum, row, cu_seqlens=ends, seq_idx="not for this kernel")
    assert (state.flatten().tolist(), last) == ([1, 2, 6, 14], None)
    assert by_document("cu_seqlens", running_sum, row)[0].flatten().tolist() == [1, 3, 7, 15]


def recurrence(query, key, value, gates, *, scale, cu_seqlens):
    """Linear attention with one gate per head, token by token: (1, T, H, ...) as fla-core's `chunk_simple_gla`."""
    ends, results = [0, query.shape[1]] if cu_seqlens is None else cu_seqlens.tolist(), []
    form = value.dtype
    query, key, value, gates = (tensor.double() for tensor in (query, key, value, gates))
    for start, end in itertools.pairwise(ends):
        state = 0.0
        for at in range(start, end):
            state = state * gates[0, at].exp()[:, None, None] + key[0, at, :, :, None] * value[0, at, :, None, :]
            results.append(scale * torch.einsum("hs,hsp->hp", query[0, at], state))
    return torch.stack(results)[None].to(form), None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("has_ends", [True, False])
@pytest.mark.parametrize("kind", daily(MAMBA_KINDS, "bamba"))
def test_mamba_is_linear_attention(monkeypatch, isolate, kind, has_ends):
    """As on a GPU, with another kernel, in fp64: transformers' own computation takes fp32 in between."""
    monkeypatch.setattr(linear_attention, "_linear_attention_kernel", lambda: recurrence)
    left_out = () if has_ends else ("cu_seq_lens_q", "cu_seq_lens_k")
    require_equal_when_packed(model_of(kind, torch.float64), isolate, is_on_cpu=False, left_out=left_out)


@pytest.mark.parametrize(("form", "has_cache"), [(torch.float32, False), (torch.bfloat16, True)])
def test_mamba_is_computed_by_pytorch_in_fp32_and_with_a_cache(monkeypatch, isolate, form, has_cache):
    """The kernel would round products of fp32, and its last state has another shape than transformers'."""
    monkeypatch.setattr(linear_attention, "_linear_attention_kernel", lambda: lambda *_, **__: pytest.fail("called"))
    model, row = model_of("bamba", form).eval(), {"input_ids": torch.arange(9)[None], "use_cache": has_cache}
    expected = model(**row).logits
    isolate(model, is_on_cpu=False)
    torch.testing.assert_close(model(**row).logits, expected)


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_on_the_output_projection_of_mamba_is_trained(monkeypatch, isolate):
    """The fused kernel of mamba-ssm would read the weight beneath it."""
    monkeypatch.setattr(linear_attention, "_linear_attention_kernel", lambda: recurrence)
    is_new_implementation, func_name = True, linear_attention.MAMBA_FUSED

    def torch_function(*_, **__):
        return None

    @functools.wraps(modeling_bamba.mamba2_split_conv1d_scan_combined)
    def fused(*_, **__):
        pytest.fail(f"called: {is_new_implementation} {torch_function} {func_name}")

    monkeypatch.setattr(modeling_bamba, "mamba2_split_conv1d_scan_combined", fused)
    model = get_peft_model(model_of("bamba", torch.bfloat16), LoraConfig(r=1, target_modules=["out_proj"]))
    isolate(model, is_on_cpu=False)
    model(**row_of([torch.arange(5), torch.arange(4)]), use_cache=False).logits.float().square().mean().backward()
    gradients = [tensor.grad for name, tensor in model.named_parameters() if "out_proj.lora_B" in name]
    assert gradients
    assert all(gradient.norm() > 0 for gradient in gradients)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_keep_documents_apart_on_a_gpu(isolate, relative_difference, kind):
    """As `test_a_packed_row_has_...`, in bf16 with fla-core's kernels; 32 roundoffs as in `train.isolation`.

    The documents alone are computed by what transformers calls, which for Mamba-2 is PyTorch.
    """
    if kind != "lfm2":
        pytest.importorskip("fla", reason="fla-core is in the images from Ampere on")
    model = model_of(kind, torch.bfloat16).cuda()
    documents = [torch.randint(2, 120, (length,)) for length in (200, 70, 130)]

    def packed(first):
        row = {
            name: tensor.cuda() if torch.is_tensor(tensor) else tensor
            for name, tensor in row_of([first, *documents[1:]]).items()
        }
        return model(**row | {"max_length_q": 200, "max_length_k": 200}, use_cache=False).logits[0]

    alone = torch.cat([model(input_ids=tensor[None].cuda(), use_cache=False).logits[0] for tensor in documents])
    (alone.float() ** 2).mean().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    isolate(model, is_on_cpu=False)
    result = packed(documents[0])
    (result.float() ** 2).mean().backward()
    assert relative_difference(result, alone) < 32 * 2.0**-8
    with torch.no_grad():
        other = packed((documents[0] + 1) % 120)
    assert not torch.equal(other[:200], result[:200])
    assert relative_difference(other[200:], result[200:]) <= (
        32 * 2.0**-8 if kind == "qwen3_next" else 2.0**-9
    )  # experts: moved
    for name, parameter in model.named_parameters():
        if expected[name].norm() > 1e-6:
            assert relative_difference(parameter.grad, expected[name]) < 0.25, name
