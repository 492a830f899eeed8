"""Engine: runs a plan on one rank, and watches it.

It knows the features' handlers and the plan. Begin with `engine`. `watch` notices where a rank waits or
has died on this machine, `alive` another machine or process; `clock`, `graphs`, `gpu` and `device` are of
the accelerator.
"""
