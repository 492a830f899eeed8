"""ZeRO: reduces gradients over dp (`run`), and shards optimizer states, gradients, parameters over it.

Begin with the header of `plan`; `run` does it on a rank. Of a parameter unit, `weights`, `gradient` and
`optimizer_state` hold the tensors, each with the states that they can be in; `units` puts the three together,
`part` says which range a rank owns, and `shard` lays the parameters out in one flat buffer. CLIP is one
all-reduce over all ranks of [norm squared, found_inf, loss, tokens]: it gives every rank the loss, and the
factor by which STEP scales gradients.
"""
