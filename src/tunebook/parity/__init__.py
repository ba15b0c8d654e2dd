"""Parity: train one recipe in several configurations, one after another, and compare their losses step by step."""
