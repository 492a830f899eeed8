"""API: the functions of `import threed`, which the command line calls too.

Begin with `plans`: load, plan, show, check, train. (`predict`, `search` and `report` are the `verb` of their
folders' modules of that name, `search` of layout_search/verb.)
"""
