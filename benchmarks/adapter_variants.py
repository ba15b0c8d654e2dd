"""Whole-model speed of LoRA variants: Llama 3.1 8B sizes, random weights, rows of 8192 of documents of 512."""
import json, sys, time, os, torch, warnings
warnings.filterwarnings("ignore")
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from peft import LoraConfig, get_peft_model

from tunebook.model import blocks, varlen_attention
from tunebook.model.adapted_products import share_inputs
from tunebook.config.choices import Attention
from tunebook.train.one_pass_head import OnePassLogProbFunction
import torch._functorch.config as fc
out = open(sys.argv[1], "a"); layers = int(os.environ.get("LAYERS", "32")); T = 8192
dev = "cuda"
varlen_attention.register(Attention.varlen_attention)
cfg = AutoConfig.for_model("llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, rms_norm_eps=1e-5, max_position_embeddings=131072, tie_word_embeddings=False)

class Fp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, ws, wt, wts):
        x2 = x.reshape(-1, x.shape[-1])
        s = x2.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / 448.0
        q = (x2.float() / s).to(torch.float8_e4m3fn)
        y = torch._scaled_mm(q, w.t(), scale_a=s, scale_b=ws.t(), out_dtype=torch.bfloat16, use_fast_accum=True)
        ctx.save_for_backward(wt, wts); ctx.shape = x.shape
        return y.reshape(*x.shape[:-1], -1)
    @staticmethod
    def backward(ctx, g):
        wt, wts = ctx.saved_tensors
        g2 = g.reshape(-1, g.shape[-1])
        s = g2.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / 448.0
        q = (g2.float() / s).to(torch.float8_e4m3fn)
        dx = torch._scaled_mm(q, wt.t(), scale_a=s, scale_b=wts.t(), out_dtype=torch.bfloat16, use_fast_accum=True)
        return dx.reshape(ctx.shape), None, None, None, None

class Fp8Linear(torch.nn.Module):
    def __init__(self, lin):
        super().__init__()
        w = lin.weight.data
        s = w.abs().amax(1, keepdim=True).float() / 448.0
        self.register_buffer("w", (w.float() / s).to(torch.float8_e4m3fn)); self.register_buffer("ws", s)
        t = w.t().contiguous(); st = t.abs().amax(1, keepdim=True).float() / 448.0
        self.register_buffer("wt", (t.float() / st).to(torch.float8_e4m3fn)); self.register_buffer("wts", st)
        self.weight = None
    def forward(self, x):
        return Fp8.apply(x, self.w, self.ws, self.wt, self.wts)

def build(shared, fp8, compiled, recompute):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(dev):
        m = AutoModelForCausalLM.from_config(cfg, attn_implementation="varlen_attention", dtype=torch.bfloat16)
    torch.set_default_dtype(torch.float32)
    m = get_peft_model(m, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    for p in m.parameters():
        if p.requires_grad: p.data = p.data.float()
    base = m.get_base_model()
    if fp8:
        for mod in base.model.layers.modules():
            if hasattr(mod, "base_layer"): mod.base_layer = Fp8Linear(mod.base_layer)
    if shared: share_inputs(base) if not fp8 else share_inputs(base)
    m.train()
    m.enable_input_require_grads()
    if recompute: base.gradient_checkpointing_enable({"use_reentrant": False})
    if compiled: blocks.compile_layers(base, recomputes=False)
    return m, base

def variant(name, shared=True, fp8=False, budget=1.0, compiled=True, recompute=False, selective=False, steps=4, passes=4):
    import gc
    torch._dynamo.reset(); gc.collect(); torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats()
    t0 = time.time()
    m, base = build(shared, fp8, compiled, recompute)
    from tunebook.facts.compiling import set_up_compiler
    set_up_compiler(recomputes=selective)
    fc.activation_memory_budget = budget
    params = [p for p in m.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(params, lr=3e-5, fused=True)
    g = torch.Generator().manual_seed(1)
    cu = torch.arange(0, T + 1, 512, dtype=torch.int32, device=dev)
    pos = (torch.arange(T) % 512)[None].to(dev)
    times, losses = [], []
    for step in range(steps):
        torch.cuda.synchronize(); t = time.time(); total = 0
        for _ in range(passes):
            ids = torch.randint(0, 128256, (1, T), generator=g).to(dev)
            with torch.autocast("cuda", torch.bfloat16):
                h = base.model(input_ids=ids, position_ids=pos, cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=512, max_length_k=512, use_cache=False).last_hidden_state[0]
                lp = OnePassLogProbFunction.apply(h[:-1], base.lm_head.weight, None, ids[0, 1:], 1.0, 4096)[0]
                loss = -lp.sum() / (passes * (T - 1))
            loss.backward(); total += loss.detach()
        torch.nn.utils.clip_grad_norm_(params, 1.0); opt.step(); opt.zero_grad()
        torch.cuda.synchronize(); times.append(time.time() - t); losses.append(round(float(total), 5))
    line = dict(name=name, tokens_per_second=round(passes * T / min(times)), step_s=[round(x, 3) for x in times], gib=round(torch.cuda.max_memory_allocated() / 2**30, 2), losses=losses, total_s=round(time.time() - t0, 1))
    out.write(json.dumps(line) + "\n"); out.flush(); print(json.dumps(line), flush=True)
    del m, base, opt, params

VARIANTS = dict(
    now=dict(shared=False), shared=dict(), b7=dict(budget=0.7), b6=dict(budget=0.6), sel=dict(selective=True),
    b3=dict(budget=0.3), b15=dict(budget=0.15), ckpt=dict(recompute=True),
    fp8=dict(fp8=True), fp8_b6=dict(fp8=True, budget=0.6), fp8_b4=dict(fp8=True, budget=0.4), fp8_b2=dict(fp8=True, budget=0.2), b45=dict(budget=0.45),
)
for name in sys.argv[2:]:
    try: variant(name, **VARIANTS[name])
    except Exception as e:
        import traceback; traceback.print_exc(); out.write(json.dumps(dict(name=name, error=repr(e)[:500])) + "\n"); out.flush()
