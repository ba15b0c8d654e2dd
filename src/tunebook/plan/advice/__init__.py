"""Suggest changes that make a run fit."""
