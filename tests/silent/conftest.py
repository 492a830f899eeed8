"""Trials of faults that other frameworks had: with ranks as threads (`one_core`), or as processes
(`begin`)."""

from tests.gloo.conftest import begin, cache, mount

__all__ = ["begin", "cache", "mount"]
