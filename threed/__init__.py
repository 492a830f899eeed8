"""threed: pretrain GPT-style models over data, tensor and pipeline parallelism, from one plan."""

__version__ = "0.1.0"
