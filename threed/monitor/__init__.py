"""Monitor: what a run measured: metrics, traces, logs, and the comparison with the prediction.

Begin with `measure`. `run` reads the folder of a run, `compare` sets it against its plan.
"""
