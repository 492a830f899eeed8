"""ZeRO: optimizer states, gradients and parameters sharded over dp: gather, reduce, step.

Begin with the header of `plan`; `run` does it on a rank; `state` holds a unit's tensors.
"""
