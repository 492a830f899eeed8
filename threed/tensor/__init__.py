"""Tensor: what layers compute with, over megatron-core's layers: products, attention, losses, kernels.

What depends on megatron-core is here and in `data`. It knows `comm` and `spec`. Begin with `layers`;
`context` is what a layer is given while it runs. `pool` and `disk` keep tensors that are used in turn or
are on disk.
"""
