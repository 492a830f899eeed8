"""Schedules: orders of a pipeline's tasks: named ones (`orders`), searched ones, those of a user's file.

An order says which position does what when, and nothing of tensors or instructions. It knows `base`; no
torch. Begin with `orders`: each named schedule with its picture. `rule` builds an order from five
parameters, `explore` varies them, `bound` gives a lower bound. A new schedule is a row of
`orders.SCHEDULES`.
"""
