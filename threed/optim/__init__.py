"""Optim: the optimizers, the learning rate, the loss scale, and the step over one shard.

An optimizer is a row of `registry.OPTIMIZERS`: the buffers that it keeps, and its update. Begin with
`base`.
"""
