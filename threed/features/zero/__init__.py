"""ZeRO: optimizer states, gradients and parameters sharded over dp: gather, reduce, clip, step.

Begin with the header of `plan`; `run` does it on a rank, `state` holds a unit's tensors, `shard` lays the
parameters of a unit out in one flat buffer. CLIP is one all-reduce over all ranks of [norm squared,
found_inf, loss, tokens]: it gives every rank the loss, and the factor by which STEP scales gradients.
"""
