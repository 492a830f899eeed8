"""Layout search: `threed search`: the fastest layout of a config on so many devices.

An estimator prices thousands of layouts, and the full plan judges the best. It knows prediction and the
planner. Begin with `search`.
"""
