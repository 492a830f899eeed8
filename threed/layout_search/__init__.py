"""Layout search: `threed search`: the fastest layout of a config on so many devices.

`space` lists layouts; `bounds` drops those that are too slow, and `memory_filter` those that are too large,
without a plan; `short_plan` times the others by real plans of few micro-batches; `best_first` keeps the best;
the full plan judges those (`search`).
"""
