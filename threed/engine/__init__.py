"""Engine: runs a plan on one rank; notices hangs (`watch`), and ranks and machines that died (`heartbeat`).

It knows the handlers of features, and the plan. Begin with `engine`. An instruction waits for those whose
results it uses, and for those that still use the memory into which it writes (`program/order` lists them).

`watch` is a thread that knows which instruction the rank is in and for how long, and sees by its own client
of the store when another rank has failed. `heartbeat` sees that another machine is off or that a neighbour
was killed. By `shared` every host proves that it sees the shared files. `verify` computes a step twice;
`diagnose` looks for the first number that is not finite; both ask `inspect` what each instruction computed.
`graphs` records and replays CUDA graphs between the handlers and torch. `gpu` sees that each rank has an
accelerator of its own, `device` what attention and compilers can do there. `loopback` runs all ranks of a
mesh on threads of one process.
"""
