"""Features: pipeline, zero (data parallelism), activation and offload; `plan.py` is a pass, `run.py` runs.

A feature knows `program` and below, and no other feature. `pipeline` sends between positions, `zero`
shards optimizer states, gradients and parameters, `activation` recomputes, `offload` moves tensors to CPU
or disk. A gradient is reduced by `zero/run.py`, where `zero/plan.py` has placed the instruction.
"""
