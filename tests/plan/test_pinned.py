"""Pinned host memory where torch's allocator would round: registered by hand, given back before it goes."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from threed.devices import pinned
from threed.tensor.pool import Pool

HOST = torch.device("cpu")


class Driver:
    """What is asked of CUDA's runtime. `fails`: the code that a registration returns."""

    def __init__(self, fails: int = 0):
        self.fails, self.calls, self.pages = fails, [], {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append("register")
        self.pages[address] = size
        return self.fails

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append("unregister")
        del self.pages[address]
        return 0


@pytest.fixture
def old_torch(monkeypatch) -> Any:
    def made(fails: int = 0) -> Driver:
        driver = Driver(fails)
        monkeypatch.setattr(pinned, "EXACT_FROM", (99, 0))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: driver.calls.append("synchronize"))
        return driver

    return made


def test_pages_are_registered_and_given_back(old_torch):
    driver = old_torch()
    pool = Pool({3 << 10: 11}, torch.float32, HOST, pin=True)
    assert list(driver.pages.values()) == [4 * 11 * (3 << 10)]  # no more than was asked for
    buffer = pool.take(3 << 10)
    assert buffer.data_ptr() in driver.pages and not buffer.any()
    buffer.fill_(2.0)
    del pool
    gc.collect()
    assert driver.calls == ["register"] and buffer.sum() == 2 * (3 << 10)  # a view holds the pages
    del buffer
    gc.collect()
    assert driver.calls == ["register", "synchronize", "unregister"] and not driver.pages


def test_where_it_fails_torch_allocates(old_torch, monkeypatch):
    driver, zeros, asked = old_torch(fails=2), torch.zeros, []

    def allocate(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        asked.append(pin_memory)
        return zeros(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros", allocate)
    assert len(pinned.zeros(1 << 12, torch.float32)) == 1 << 12
    gc.collect()
    assert asked == [True] and driver.calls == ["register"]
    assert len(pinned.zeros(8, torch.float32)) == 8 and driver.calls == ["register"]  # less than a page
