"""The quickstart's model folder without weights: architecture, tokenizer, chat template.

The weights are random at run time. A Qwen2 of this size is large enough for the tasks of `conversations.py` and small
enough to train on two CPU cores in about a minute.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

PAD_TOKEN = "<|endoftext|>"
START_TOKEN = "<|im_start|>"
EOS_TOKEN = "<|im_end|>"
SPECIAL_TOKENS = (PAD_TOKEN, START_TOKEN, EOS_TOKEN)

# Just large enough that every word of the tasks is one token in each of its spellings.
VOCABULARY_SIZE = 832
MAX_POSITIONS = 1024

# How Qwen2 cuts text before the byte-pair merges: words with the space before them, digits one by one.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# ChatML. The generation markers tell the trainer what the assistant says: its words and the EOS that ends them.
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content + '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def build_tokenizer(texts: Iterable[str], vocabulary_size: int = VOCABULARY_SIZE) -> Tokenizer:
    """A byte-level BPE trained on the texts; the special tokens take the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def build_tokenizer_config() -> dict[str, Any]:
    """What transformers needs to know beside `tokenizer.json`."""
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": EOS_TOKEN,
        "pad_token": PAD_TOKEN,
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
    }


def build_config() -> dict[str, Any]:
    """The architecture. Attention heads of 32, embeddings shared with the output."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "dtype": "float32",
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "initializer_range": 0.06,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": SPECIAL_TOKENS.index(EOS_TOKEN),
        "pad_token_id": SPECIAL_TOKENS.index(PAD_TOKEN),
    }


def build_generation_config() -> dict[str, Any]:
    """Greedy answers that end at the template's EOS."""
    config = build_config()
    return {"do_sample": False, "eos_token_id": config["eos_token_id"], "pad_token_id": config["pad_token_id"]}


def write_model_files(folder: Path, texts: Iterable[str]) -> None:
    """Write the model folder; `texts` are what the tokenizer learns from."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer(texts).save(str(folder / "tokenizer.json"))
    for name, content in (
        ("config.json", build_config()),
        ("generation_config.json", build_generation_config()),
        ("tokenizer_config.json", build_tokenizer_config()),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
