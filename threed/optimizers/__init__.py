"""Optimizers, one per file."""
