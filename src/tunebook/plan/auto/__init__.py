"""Resolve values that a configuration leaves to Tunebook (`auto`), with a reason for each."""
