"""Monitor: what a run measured: metrics, traces, logs, and the comparison with the prediction.

Begin with `measure`. `log` gives the metrics of each step to metrics.jsonl, the console and the loggers;
`attribute` assigns the time between marks to causes, of a predicted step as of a measured one; `goodput`
says what the time since a run began went into. `run` reads the folder of a run, `state` whether it is
running, and `compare` sets it against its plan.
"""
