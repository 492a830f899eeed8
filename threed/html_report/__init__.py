"""HTML report: `threed report`: a page with the mesh, memory, timelines and course of a run.

It reads plans and folders of runs. Begin with `content`: what is shown, before it is drawn.
"""
