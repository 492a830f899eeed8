"""Launcher: starts and restarts the processes of ranks, on one machine or under torch's elastic agent.

Begin with `local` (one machine: it forks all ranks) or `agents` (`python -m threed.torchrun`: torch's agent
on each machine; `attend` is a thread next to it that passes signals on and sees how a rank has ended).
`rank` is one rank's process, from its first line to its exit status. `elastic` decides in the first second
of rank 0, by the failures so far and `base/restart`, whether ranks go on. No connection between machines is
threed's own.
"""
