"""Offload: tensors move to the host's memory or a disk, and come back before they are needed.

The name of a slot on another tier begins with the tier (`host_state p3`). OFFLOAD goes one tier down and
FETCH one up, on the lanes d2h, h2d, read and write; the optimizer's step on the host runs on lane host.
With offload.overlap=next the host steps at the head of the next program (`plan.head`), so a run has three
training programs: `train`, `enter` where no update waits, and `settle` where no step follows.
`program.seam` says which slots are alive between them.
"""
