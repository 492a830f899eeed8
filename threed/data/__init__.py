"""Data: from text to windows of tokens, in an order that depends on the seed alone.

It knows `models` only to ask a family for its vocabulary. Begin with `tokens`: `data.source` becomes
tokens on disk, once. `samples` cuts them into windows, `mix` draws from several sources.
"""
