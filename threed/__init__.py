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

# Ranks are forked, and a process that has started CUDA cannot fork ranks that use it. To ask torch whether
# there is a GPU starts it, unless this is set: then torch asks NVML.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

if TYPE_CHECKING:
    from threed.api.inference import evaluate, generate
    from threed.api.initialize import initialize
    from threed.api.plans import check, plan, show, train
    from threed.base.errors import ThreedError
    from threed.base.version import __version__ as __version__
    from threed.config.load import load
    from threed.data.sampling import Sampling
    from threed.html_report.report import report
    from threed.layout_search.search import search
    from threed.models.own.model import Layers
    from threed.models.own.spec import Spec
    from threed.monitor.run import Run
    from threed.prediction.predict import predict
    from threed.program.plan import Plan
    from threed.schema import Config
    from threed.training.hooks import Callback
    from threed.training.trainer import Trainer

__all__ = ["Callback", "Config", "Layers", "Plan", "Run", "Sampling", "Spec", "ThreedError", "Trainer",
           "check", "evaluate", "generate", "initialize", "load", "plan", "predict", "report", "search",
           "show", "train"]

_HOMES = {"__version__": "base.version", "Callback": "training.hooks", "Config": "schema",
          "Layers": "models.own.model", "Plan": "program.plan", "Run": "monitor.run",
          "Sampling": "data.sampling", "Spec": "models.own.spec", "ThreedError": "base.errors",
          "Trainer": "training.trainer", "check": "api.plans", "evaluate": "api.inference",
          "generate": "api.inference", "initialize": "api.initialize", "load": "config.load",
          "plan": "api.plans", "predict": "prediction.predict", "report": "html_report.report",
          "search": "layout_search.search", "show": "api.plans", "train": "api.plans"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'threed' has no attribute '{name}'; it has {', '.join(__all__)}")
    return getattr(import_module(f"threed.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
