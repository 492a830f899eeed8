"""Layout search: `threed search`, the fastest layout of a config on so many devices.

`space` lists layouts; `bounds` drops those that are too slow or too large, at best; `short_plan` says how
long the rest take and what memory they need, by real plans of few micro-batches; `best_first` does as little
of this as it can, and the full plan decides about the best (`search`).
"""
