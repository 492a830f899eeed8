"""Comm: the only way to other ranks: process groups, collectives, messages, store; lanes are its queues.

It knows `devices`. Begin with `group`: each collective has a name, and its bytes are counted; `process` has
the groups of torch.distributed. `environment` is this process's place in a run, `store` is where ranks meet,
`lanes` run work next to the computation.
"""
