"""The verb `threed.predict`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from threed.base.errors import InputError, check_type
from threed.base.quantity import BYTES, parse_count
from threed.base.remember import remembering
from threed.models.model import model_flops
from threed.planner import make_mesh, make_plan
from threed.planner.from_config import CONFIG, analysed, config_of, load_config
from threed.prediction import host
from threed.prediction.analytic import cost as analytic_cost
from threed.prediction.analytic import uneven
from threed.prediction.contention import PricedPlan
from threed.prediction.hardware import DEFAULT, OF_CPUS, Hardware
from threed.prediction.peak import memory_of, plan_room, too_much
from threed.prediction.rescale import transferred
from threed.prediction.step import StepPrediction, predicted_step
from threed.program.analysis import Analysis
from threed.program.costs import device_of, read_costs
from threed.program.plan import Plan
from threed.schema import Config


class Training(NamedTuple):
    """A whole training, on so many tokens."""

    tokens: float
    days: float
    device_hours: float
    dollars: float


@dataclass(frozen=True)
class MachinePrediction:
    """A step on a machine: whether it fits there, and its speed."""

    step: StepPrediction
    machine: Hardware
    is_usual: bool  # whether nobody has asked for the machine
    memory_bytes: int  # of a device
    too_much: str | None  # why that is too little
    host: host.HostUse
    host_too_much: str | None
    devices: int
    counted: str  # tokens or samples
    rate: float  # of them a second
    mfu: float | None  # share of the devices' peak
    training: Training | None

    def document(self) -> dict[str, Any]:
        """What `threed.predict` returns."""
        machine = self.machine
        return {**self.step.document(), "memory_bytes": self.memory_bytes,
                "usable_bytes": machine.usable_bytes(self.memory_bytes), "too_much": self.too_much,
                **host.document(self.host, machine), "host_too_much": self.host_too_much,
                **({"processors": machine.devices} if machine.waits else {}),
                "hardware": machine.title, "devices": self.devices, f"{self.counted}_per_s": self.rate,
                "mfu": self.mfu, **({"training": self.training._asdict()} if self.training else {}),
                "default_hardware": self.is_usual}


def predict(what: Config | Plan, hardware: str = "", costs: str | Path | None = None,
            tokens: float | str | None = None, imbalance: float = 1.0) -> dict[str, Any]:
    """Predict a step by walking the plan with a clock.

    `hardware` is what `threed predict --hardware` takes: a name of configs/hardware or a file, and then
    single numbers ("h100-sxm,adapter_gbps=200"); the default is an A100, or a CPU core where run.device=cpu.
    `costs`: the folder or the costs.json of a run, whose measured seconds replace the prices of kernels; of a
    run with another mesh, micro-batch size or schedule (its folder) they are scaled by these prices.
    `tokens`: how many to train on ("15T"), for `training`: days, device-hours, dollars.
    `imbalance`: with experts, the rows of the busiest rank over those of balanced ones (the metric
    moe/imbalance); 1: all ranks get as many.

    Returns the document of `threed predict --json`: `step_time` in seconds, `bubble` as a share of it, and
    `stages`, a row a pipeline position (`peak_bytes` by tier, `peak`: what it is made of, `busy_s`,
    `sent_bytes` by axis); `memory_bytes`: of a device; `too_much`: why that is too little, or
    None; `host`: what the ranks of the fullest node need of its memory, and `host_too_much`, the same of it.
    Raises InputError, also for a wrong `hardware` or `costs`.

    >>> threed.predict(threed.load("configs/toy.yaml"), "h100-sxm")["step_time"]
    """
    return predicted(what, hardware, costs, tokens, imbalance).document()


@remembering()
def predicted(what: Config | Plan, hardware: str = "", costs: str | Path | None = None,
              tokens: float | str | None = None, imbalance: float = 1.0) -> MachinePrediction:
    """What `predict` makes its document of."""
    check_type("hardware", hardware, str, 'a text such as "h100-sxm,adapter_gbps=200"')
    room = plan_room(machine_of(hardware, what), what) if isinstance(what, Config) else None
    machine, step = priced(analysed(what, room), hardware, costs, imbalance)
    given = what if isinstance(what, Config) else None
    return prediction(step, machine, parse_tokens(tokens), not hardware and costs is None, given)


def parse_tokens(tokens: float | str | None) -> float | None:
    """A number of tokens, or its text: "15T". InputError where it is none, or below 1."""
    check_type("tokens", tokens, (int, float, str, None), 'a number of tokens, such as 15e12 or "15T"')
    count = parse_count(tokens) if isinstance(tokens, str) else tokens
    if count is not None and not 1 <= count < math.inf:
        raise InputError(f"tokens={tokens}: give a number of at least 1, such as 15e12 or 15T")
    return count


def priced(analysis: Analysis, hardware: str, costs: str | Path | None,
           imbalance: float = 1.0) -> tuple[Hardware, PricedPlan]:
    """A machine, and a plan with its costs. The arguments are those of `predict`."""
    plan = analysis.plan
    check_type("imbalance", imbalance, (int, float), "a number of at least 1")
    if not 1 <= imbalance < math.inf:
        raise InputError(f"imbalance={imbalance:g}: give a number of at least 1, the rows of the busiest "
                         "rank over those of balanced ones")
    if imbalance != 1 and not uneven(plan.table):
        raise InputError(f"imbalance={imbalance:g}: no rows go to experts of other ranks (parallel.ep is 1, "
                         "or the model has no experts); leave it out")
    if imbalance > (most := max(uneven(plan.table).values(), default=1)):
        raise InputError(f"imbalance={imbalance:g}: where {most} ranks hold all experts of a block together, "
                         f"one gets at most {most} times the rows of balanced ones; give at most {most}")
    if imbalance != 1 and costs is not None:
        raise InputError(f"imbalance={imbalance:g}: measured costs have that of their run; leave one of the "
                         "two out")
    check_type("costs", costs, (str, Path, None), "the folder of a run, or its costs.json")
    machine = machine_of(hardware, config_of(plan))
    if costs is None:
        cost = analytic_cost(plan, machine, None, imbalance)
        return machine, PricedPlan(analysis, cost, machine.title, machine)
    measured, digest, _ = read_costs(costs)
    source = f"{costs}" + (f", measured on {device}" if (device := device_of(costs)) else "")
    if digest != analysis.digest and (Path(costs) / CONFIG).exists():
        moved = transferred(plan, machine, make_plan(load_config(Path(costs))), measured)
        return machine, PricedPlan(analysis, moved.cost, f"{source}, another plan: {moved}")
    return machine, PricedPlan(analysis, analytic_cost(plan, machine, measured), source)


def machine_of(hardware: str, config: Config) -> Hardware:
    return Hardware.parse(hardware, OF_CPUS if config.run.device == "cpu" else DEFAULT)


def prediction(priced: PricedPlan, machine: Hardware, tokens: float | None = None,
               is_usual: bool = False, given: Config | None = None) -> MachinePrediction:
    """Of a plan with its costs. `tokens`: of a whole training. `is_usual`: as in MachinePrediction. `given`:
    the config before what is `auto` was decided, for settings that would fit; None: that of the plan."""
    config = config_of(priced.plan)
    model, ranks = config.model, make_mesh(config).size
    step = predicted_step(priced, machine, config.run.verify_every)
    memory = memory_of(machine, config)
    use = host.use_of(config, machine, [row.summary for row in step.stages])
    small, few = too_much(step.peaks, machine, memory), host.too_much(use, machine, given or config)
    if tokens is not None and model.counted != "tokens":
        raise InputError(f"tokens={tokens:g}: the model has layers of your own, which count {model.counted}; "
                         "leave it out")
    done = model_flops(model, config.train.global_batch_size, config.train.micro_batch_size)
    rate = config.tokens_per_step / step.step_s if step.step_s else 0.0
    mfu = done / step.step_s / ranks / machine.peak(BYTES[config.precision.dtype]) if step.step_s else None
    training = None
    if tokens is not None:
        hours = tokens / rate / 3600 if rate else 0.0
        training = Training(tokens, hours / 24, hours * ranks, hours * ranks * machine.dollars)
    return MachinePrediction(step, machine, is_usual, memory, small, use, few, ranks, model.counted, rate,
                             mfu, training)
