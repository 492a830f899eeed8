"""Offload: tensors move to the host's memory or a disk, and come back before they are needed."""
