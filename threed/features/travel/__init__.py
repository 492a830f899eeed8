"""Travel: tensors that units hand on go to other ranks, before later units read them (`spec.travel`).

`plan` puts a GATHER or an EXCHANGE behind the forward that makes them, and a REDUCE or an EXCHANGE of their
gradients behind the backward of what reads them; `run` does what these say.
"""
