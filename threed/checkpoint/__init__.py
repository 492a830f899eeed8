"""Checkpoint: save and load on any mesh, agreed by all ranks and proved by checksums.

Begin with `boxes`, then `format` and `manifest`. Between two steps, the program `snapshot` copies tensors to
the host; `save` writes them in stages on threads while the run goes on, and a checkpoint is saved once its
folder has its final name on disk. `choose` picks the checkpoint to resume, `load` has all ranks take the
same one, `box_reader` finds the bytes, `proof` is a checksum of a whole tensor that adds up over boxes, and
`copy` keeps copies elsewhere. A folder whose manifest cannot be read is never removed.
"""
