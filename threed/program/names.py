"""Names of the programs of a plan.

train      a step of the run; with offload.overlap=next it begins with the host's updates of the step before
enter      with offload.overlap=next: a step before which no update waits
settle     with offload.overlap=next: the updates that wait, where no step follows at once
verify     a step without its update: the first run of a step that is computed twice (run.verify_every)
evaluate   forward only
generate   forward only: makes the logits of each sequence's last token, and no loss
snapshot   between two steps: copies to the host what a checkpoint saves, while the next step begins
"""

from __future__ import annotations

TRAIN, ENTER, SETTLE = "train", "enter", "settle"
EVALUATE, GENERATE, VERIFY, SNAPSHOT = "evaluate", "generate", "verify", "snapshot"
FORWARD_ONLY = (EVALUATE, GENERATE)
# With offload.overlap=next: the programs after which gradients wait for their STEP, and those that begin with
# such STEPs.
LEAVES_WAITING, APPLIES_WAITING = (TRAIN, ENTER), (TRAIN, SETTLE)
