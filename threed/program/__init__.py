"""Program: the plan as a value: instructions of each rank, what each touches (`effects`), and checks.

It knows `schedules`, `spec` and the config; no torch but in `slots`. Begin with `instruction`, then
`effects`: what each op reads, writes and sends, told once, from which checks, buffers, prices and the
engine follow. `simulate` walks a plan with a clock.
"""
