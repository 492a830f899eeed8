"""Interop: from and to other tools: `threed convert`, `init`, `import`, `export`.

`convert` reads configs of DeepSpeed and arguments of Megatron-LM by the rows of `config/keys`: `arguments`
cuts a list of them, `dump` finds them in a log. `hf` maps models of transformers: their names in `hf/names`,
and in `hf/slices` which part of a parameter a tensor is.
"""
