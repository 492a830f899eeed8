"""A campaign of faults against whole runs: python -m tests.chaos --faults 1000 --seed 7 (make chaos).

    trial      one run of a small model, one fault, whatever restarts are needed, and what must be true at the
               end
    sister     the models and meshes that are run (the toy's little sisters), and their undisturbed references
    fault      what happens to a run, when, and which words must tell of it: faults/*.py draw them from a seed
    site       one system call of a save: the n-th `write` of a file, say, by rank 0. interposer.c strikes
               there
    verdict    the name of what was not as it must be: lost, wrong, steps, orphan, leftover, hang, silent,
               noise, status

A trial's number and the campaign's seed say everything about it that is drawn; the rest is the clock's.
"""
