"""ZeRO: reduces gradients over dp, and shards optimizer states, gradients and parameters over it.

Begin with the header of `plan`; `run` does it on a rank, `state` holds a unit's tensors, `shard` lays the
parameters of a unit out in one flat buffer. CLIP is one all-reduce over all ranks of [norm squared,
found_inf, loss, tokens]: it gives every rank the loss, and the factor by which STEP scales gradients.
"""
