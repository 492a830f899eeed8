"""Comm: the only way to other ranks: process groups, collectives, messages, store; lanes are its queues.

It knows `base`. Begin with `group`: each collective has a name, and its bytes are counted. `environment`
is this process's place in a run, `store` is where ranks meet, `lanes` run work next to the computation.
"""
