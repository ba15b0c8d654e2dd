"""Training data: sources, formats, tokenization, loss masks, truncation, packing and sampling."""
