"""Keys of other frameworks, a row each with what it is in threed: DeepSpeed, Megatron-LM, torchtitan, PEFT.

Errors about unknown keys and `threed convert` read the same rows. Begin with `table`.
"""
