"""Prediction: time and memory of a step before it runs, from `prices` of kernels and collectives.

Begin with `analytic`: the price of each instruction. `prices` has the price of a product, of attention and
of a collective (an all-gather among them), as a function of a machine (`hardware`). `transient` runs each
kind of unit once on tensors without memory, to see what a computation holds besides slots; `peak` adds it
to what slots hold, and every command asks there. It knows the planner.
"""
