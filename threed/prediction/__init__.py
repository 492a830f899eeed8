"""Prediction: time and memory of a step before it runs, from the plan and a description of the machine.

Begin with `analytic`: the price of each instruction; `kernels` has those of products, attention and
collectives (an all-gather among them); `peak` is the memory. It knows the planner; nothing here runs on
an accelerator.
"""
