"""Layout search: `threed search`: the fastest layout of a config on so many devices.

`space` lists layouts, `estimator` says how long a step of one takes and what it holds, `search` keeps the
best, and the full plan judges those (`verb`). Tasks of stages are played for few micro-batches
(`steady_state`); where there is traffic in every micro-batch, single units are (`stream`). Tests compare
the estimator with the plan over random layouts.
"""
