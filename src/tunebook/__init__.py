"""Tunebook: a reproducible book of recipes for distributed fine-tuning of language models."""

__version__ = "0.1.0"
