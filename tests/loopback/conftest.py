"""Ranks as threads."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def _one_core(one_core):
    """Of each test here."""


@pytest.fixture(scope="module")
def run():
    """Call a function in another process, where Triton's interpreter runs kernels on a CPU. (Triton reads
    TRITON_INTERPRET when it is imported: no process can do both.)"""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        with mock.patch.dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1"):
            pool.submit(os.getpid).result()  # it starts
        yield lambda function, *given: pool.submit(function, *given).result()
