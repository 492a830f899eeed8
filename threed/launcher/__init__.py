"""Launcher: start, watch and restart the processes of ranks, on one machine or under torch's elastic agent.

Begin with `local` (one machine) or `agents` (`python -m threed.torchrun`). `rank` is one rank's process
from its first line to its exit status; `base/restart` decides on another start.
"""
