"""Activation: which activations are dropped and computed again, or kept in parts."""
