"""Base: plain things that every folder may import: errors, the mesh of ranks, quantities, signals, hashing.

It knows nothing of threed but itself, and imports no torch (`later` gives torch to those who compute). Begin
with `mesh`: the coordinate of each rank and the process groups.
"""
