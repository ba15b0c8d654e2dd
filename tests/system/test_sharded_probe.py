"""The leak probe through a model that FSDP2 has sharded, on two ranks, and training after it.

accelerate leaves FSDP2 out on a CPU, so the model is sharded here as accelerate does it on GPUs: layers, then the rest.
"""

from __future__ import annotations

import json

PROGRAM = """
import json
from dataclasses import asdict
from types import SimpleNamespace
from tunebook.train.rank_process import RankEnd
end = RankEnd()
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import add_fused_lm_head
from tunebook.train.isolation import measure_isolation
from tunebook.train.leak_probe import TrainingForward

torch.distributed.init_process_group("gloo")
for is_tied in (True, False):
    config = AutoConfig.for_model(
        "qwen2", hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=3, vocab_size=200, tie_word_embeddings=is_tied,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    add_fused_lm_head(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in [*model.model.layers, model]:
        fully_shard(part, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    trainer = SimpleNamespace(
        model=model, model_wrapped=model, _prepare_inputs=lambda inputs: inputs,
        row_collator=DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True),
        compute_loss_context_manager=lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
    )
    forward = TrainingForward(trainer)
    with torch.no_grad():
        found = measure_isolation(forward, 200)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        outputs = forward._call(forward._inputs([list(range(40)), list(range(60, 100))]) | {"fused_lm_head": True})
        loss = -outputs.log_probs.sum() / 78
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if torch.distributed.get_rank() == 0:
        print(json.dumps(asdict(found) | {"losses": losses}))
torch.distributed.destroy_process_group()
end.leave(0)
"""


def test_documents_are_isolated_and_training_goes_on(run_forked, tmp_path):
    """With a head that is tied to the embeddings, and with one of its own."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = run_forked([str(program)], ranks=2)
    assert done.exit_code == 0, done.output
    tied, its_own = (json.loads(line) for line in done.output.splitlines() if line.startswith("{"))
    for found in (tied, its_own):
        assert found["moved"] <= found["alone"] <= 2.0**-8
        assert found["leaking"] > 0.1
        assert found["tokens_together"] == found["tokens_apart"] == 78
        assert found["losses"][2] < found["losses"][1] < found["losses"][0]
    assert tied["losses"] != its_own["losses"]
