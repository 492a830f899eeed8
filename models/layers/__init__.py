"""The layers that models are made of. A file says everything of its layer: what planning must know, and what
it computes."""
