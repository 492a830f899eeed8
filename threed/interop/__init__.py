"""Interop: from and to other tools: `threed convert`, `init`, `import`, `export`.

`convert` reads configs and scripts of DeepSpeed and Megatron-LM (by the rows of `config/keys`), `shell` finds
out what a script of bash would run, `hf` maps models of transformers: names in `hf/families`, parts of
parameters in `hf/mapping`.
"""
