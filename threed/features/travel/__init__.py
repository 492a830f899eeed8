"""Travel: tensors that units hand on are sent to other ranks before later units read them.

A layer declares it (`Exchanged`, `Gathered` of spec/travel). planner/hand_overs turns that into a
`MadeTensor` of the unit that makes the tensor and a `ReadTensor` of each that reads it (program/entries).
What one instruction sends is a `Trip` (program/trips). `plan` inserts GATHER or EXCHANGE after the forward
that makes the tensor, and REDUCE or EXCHANGE of its gradient after the backward that reads it; `run` runs it.
What may come twice has a RELEASE behind the forward that reads it, and another GATHER before its backward.
"""
