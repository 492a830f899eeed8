"""Calibration: `threed calibrate` measures this machine: the constants of `prediction/hardware`.

Begin with `calibrate`; `rank` is what each process measures, one thing after the other.
"""
