"""Tensor parallelism over megatron-core: the only folder that imports its layers."""
