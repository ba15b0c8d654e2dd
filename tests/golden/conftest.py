"""Tokenizers and models of other tests, whose behaviour is recorded here."""

from __future__ import annotations

from ..data.conftest import tiny_tokenizer, tokenizer_folder  # noqa: F401
from ..data.test_template_families import family  # noqa: F401
