"""API: the functions of `import threed`, which the command line calls too.

Begin with `plans`: load, plan, show, check, train. (`predict` and `report` are in modules of that
name, `search` is in layout_search/search.)
"""
