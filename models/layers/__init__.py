"""The layers of models. A file has everything about its layer: what planning must know, and the
computation."""
