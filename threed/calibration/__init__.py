"""Calibration: `threed calibrate` measures this machine and fits the constants that predictions use.

Begin with `verb`; `rank` is what each process measures, one thing after the other.
"""
