"""Interop: from and to other tools: `threed convert`, `init`, `import`, `export`.

`convert` reads configs and scripts of DeepSpeed and Megatron-LM by the rows of `config/keys`. A script is
never run: `shell` says which words each of its commands would get. `hf` maps models of transformers: their
names in `hf/names`, and in `hf/slices` which part of a parameter a tensor is.
"""
