"""Parity: one recipe in several configurations, one after the other; do their losses agree step by step?"""
