"""Training: the loop of a run on one rank, and its callbacks.

Begin with `trainer`; `setup` makes all that it needs; `saving` are a run's checkpoints; `hooks` is the
base of callbacks, `callbacks` those that every run has.
"""
