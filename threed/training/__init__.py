"""Training: the loop of a run on one rank, and its callbacks.

Begin with `trainer`. `setup` brings a rank to its first step; `saving` are a run's checkpoints; `hooks` is
the base of callbacks, `callbacks` has those that every run has, and their order; `generation` continues
texts.
"""
