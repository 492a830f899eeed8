"""Names of the programs of a plan.

train      a step of the run; with delayed updates it applies the gradients of the step before
plain      with delayed updates: a step that applies its own gradients
enter      with delayed updates: the first delayed step, which applies no gradients
drain      with delayed updates: the last step, which applies the waiting gradients and its own
verify     a step without its update: the first run of a step that is computed twice (run.verify_every)
evaluate   forward only
generate   forward only: makes the logits of each sequence's last token, and no loss
snapshot   between two steps: copies to the host what a checkpoint saves, while the next step begins
snapshot_waiting   the same while gradients wait for their STEP
"""

from __future__ import annotations

EVALUATE, GENERATE, VERIFY = "evaluate", "generate", "verify"
SNAPSHOT, WAITING = "snapshot", "snapshot_waiting"
FORWARD_ONLY = (EVALUATE, GENERATE)
# Programs of delayed updates -> the step whose gradients STEP applies: the one before (prev), this one ("").
DELAYED_STEPS: dict[str, tuple[str, ...]] = {"enter": (), "train": ("prev",), "drain": ("prev", "")}
