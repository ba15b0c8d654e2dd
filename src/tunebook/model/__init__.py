"""The model: its tokenizer, its weights, its attention and its adapters."""
