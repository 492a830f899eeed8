"""Offload: tensors move to the host's memory or a disk, and come back before they are needed.

The name of a slot on another tier begins with the tier (`host_state p3`). OFFLOAD goes one tier down and
FETCH one up, on the lanes d2h, h2d, read and write; the optimizer's step on the host runs on lane host.
With delayed updates a step's gradients are applied during the next step (`plan.delay`), so a run has four
training programs: `train`, and `plain`, `enter` and `drain` for the steps that differ; `Table.seam` says
which slots are alive between them.
"""
