"""Checkpoint: save and load on any mesh, agreed by all ranks and proved by checksums.

Begin with `boxes`, then `format`, `save` and `load`. It knows the features' state; not how a run is driven.
"""
