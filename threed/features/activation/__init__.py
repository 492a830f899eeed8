"""Activation: which activations are dropped and computed again, or kept in parts.

FORWARD says what it keeps: everything, or only its input. Then `plan` adds a RECOMPUTE, and RELEASE and
GATHER or OFFLOAD and FETCH of the kept input. For pieces of a block it may keep a way to compute them again
(`tensor/saving`).
"""
