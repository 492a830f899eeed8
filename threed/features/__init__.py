"""Features: pipeline, zero (data parallelism), activation, offload and travel; `plan.py` is a pass, `run.py`
runs.

A feature knows `program` and below, and no other feature. `pipeline` sends between positions, `zero`
shards optimizer states, gradients and parameters, `activation` recomputes, `offload` moves tensors to CPU
or disk, `travel` sends tensors to other ranks between two units. A gradient is reduced by `zero/run.py`,
where `zero/plan.py` has placed the instruction.
"""
