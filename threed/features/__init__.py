"""Features: a folder each. `plan.py` is its pass, program -> program; `run.py` has its handlers on a rank.

A feature knows `program` and below, and no other feature. `pipeline` sends between positions, `zero`
shards optimizer states, gradients and parameters, `activation` recomputes, `offload` moves tensors to CPU
or disk. A gradient is reduced by `zero/run.py`, where `zero/plan.py` has placed the instruction.
"""
