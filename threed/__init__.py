"""threed: pretrain GPT-style models over data, tensor and pipeline parallelism, from one plan.

    config = threed.load("configs/toy.yaml", ["parallel.pp=4"])   a YAML file and overrides, checked
    plan = threed.plan(config)                                    what each rank will do, checked
    print(threed.show(plan))                                      the mesh, the units, the schedule's grid
    threed.check(plan)                                            what a rank holds and sends
    threed.predict(plan)                                          time and memory of a step
    threed.search("configs/toy.yaml", 64)["layouts"]              the best layouts on 64 devices
    threed.report(plan, "page.html")                              all of it, as a page to look at
    run = threed.train(config, callbacks=[...])                   train on all ranks
    threed.initialize([threed.Spec(Block, 64), ...], loss,        a config whose model is your own torch
                      "my.yaml", data)                            modules
    run.metrics, run.compare()                                    what it measured
    threed.generate(run.path, ["import "])                        text that it writes
    threed.evaluate(run.path, "more/*.txt")                       its loss and perplexity on other data

The names in `__all__` stay as they are from version to version; what is not in it may change. Each is
imported when it is first used, and all but `train`, `generate`, `evaluate`, `Trainer`, `initialize`,
`Layers`, `Spec` and what they need work without torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Ranks are forked, and a process that has started CUDA cannot fork ranks that use it. The call
# torch.cuda.is_available() starts it, unless this is set, which it reads each time: then it asks NVML.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

if TYPE_CHECKING:
    from threed.api import check, plan, show, train
    from threed.callback import Callback
    from threed.choosing.verb import search
    from threed.config import load
    from threed.doors.layers.model import Layers
    from threed.doors.layers.spec import Spec
    from threed.doors.layers.start import initialize
    from threed.errors import ThreedError
    from threed.inference import evaluate, generate
    from threed.monitor.run import Run
    from threed.page.verb import report
    from threed.prediction.verb import predict
    from threed.program.table import Plan
    from threed.sampling import Sampling
    from threed.schema import Config
    from threed.trainer import Trainer

__version__ = "0.2.0.dev0"
__all__ = ["Callback", "Config", "Layers", "Plan", "Run", "Sampling", "Spec", "ThreedError", "Trainer",
           "check", "evaluate", "generate", "initialize", "load", "plan", "predict", "report", "search",
           "show", "train"]

_HOMES = {"Callback": "callback", "Config": "schema", "Layers": "doors.layers.model", "Plan": "program.table",
          "Run": "monitor.run", "Sampling": "sampling", "Spec": "doors.layers.spec", "ThreedError": "errors",
          "Trainer": "trainer", "check": "api", "evaluate": "inference", "generate": "inference",
          "initialize": "doors.layers.start", "load": "config", "plan": "api", "predict": "prediction.verb",
          "report": "page.verb", "search": "choosing.verb", "show": "api", "train": "api"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'threed' has no attribute '{name}'; it has {', '.join(__all__)}")
    return getattr(import_module(f"threed.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
