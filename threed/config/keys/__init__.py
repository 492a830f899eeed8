"""Keys of other frameworks, and what each is in threed: DeepSpeed, Megatron-LM, torchtitan, PEFT.

Errors about unknown keys and `threed convert` read the same rows. Begin with `table`.
"""
