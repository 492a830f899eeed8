"""Spec: what a layer declares of itself: parameters, how they are cut over ranks, and what it costs.

Plans are made from these declarations alone, without torch. It knows `base`. Begin with `parameter`.
"""
