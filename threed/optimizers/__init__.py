"""Optimizers: a file each."""
