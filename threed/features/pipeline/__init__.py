"""Pipeline: messages between the positions of a pipeline, and the batch on its first and last one.

`plan.communicate` walks all positions with a clock and so puts every event of a step in one sequence;
`parts` has tp ranks send a part each.
"""
