"""What a kernel costs: seconds of products, of attention, and of what moves bytes; and of a collective.

* A product is computed in tiles, as many at a time as the device has units: a last wave that is not full
  takes as long as a full one. A product also reads and writes its matrices, and takes the longer of the two.
* Attention in one kernel computes the half of the square below the diagonal; its backward has five products
  for forward's two (Dao 2023). Small heads have as many exponentials and fewer products between them.
* Everything else takes its bytes over the bandwidth of memory, or on a CPU its exponentials, if these take
  longer. (A GPU computes them in units of their own.) Sums over tokens, and of rows at scattered places,
  reach a share of that bandwidth.
* A collective is a ring or, for an all-reduce over several nodes, a ring inside each node and one over the
  nodes, whichever is faster. Ranks of a node share its adapters.
* An all-to-all sends to all ranks at the same time, inside the node and to others.

Neglected: caches, the fusing of a product with what follows it, clocks that fall under load.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

from threed.prediction.hardware import GroupPlace, Hardware
from threed.spec.kernels import AttentionKernel, Kernel, Product

# Kernels that attention in one kernel launches; products of its backward, to one of forward.
_ATTENTION_KERNELS, _ATTENTION_BACKWARD, _PASSES_BACKWARD = (1, 3), 2.5, 1.3


class Prices:
    """Seconds of kernels on one device, at an element's bytes, and of the optimizer's step on the host, whose
    memory so many ranks of a node share."""

    def __init__(self, hardware: Hardware, element: int, ranks: float = 1):
        self.hardware, self.element, self._host = hardware, element, hardware.host_rate(ranks)
        self._speed = hardware.peak(element) * hardware.efficiency
        self._memory = hardware.memory_gbps * 1e9 / 8 * hardware.memory_efficiency

    def forward(self, kernels: Iterable[Kernel], graphs: int | None = None) -> float:
        """Of all kernels, in forward. `graphs`: that the host launches for them; None: it launches each."""
        return self._issued([self._forward(kernel) for kernel in kernels], graphs)

    def input_half(self, kernels: Iterable[Kernel], graphs: int | None = None) -> float:
        return self._issued([self._input(kernel) for kernel in kernels], graphs)

    def weight_half(self, kernels: Iterable[Kernel], graphs: int | None = None) -> float:
        return self._issued([self._weight(kernel) for kernel in kernels], graphs)

    def moved(self, size: float, kernels: int = 1, exponentials: int = 0) -> float:
        """Of kernels that read and write so many bytes, and compute so many exponentials."""
        return (max(size / self._memory, self._exponentials(exponentials))
                + kernels * self.hardware.kernel_us * 1e-6)

    def update(self, size: int, on_host: bool, kernels: int = 1) -> float:
        """Of the optimizer's work on so many bytes, on the host or, by so many kernels, on the device."""
        if on_host or self.hardware.waits:
            return size / self._host
        return self.moved(size, kernels)

    def _exponentials(self, count: float) -> float:
        return count * self.hardware.exponential_ns * 1e-9

    def product(self, m: int, n: int, k: int, count: int = 1) -> float:
        """Of [m, k] x [k, n], `count` times in one kernel."""
        if not min(m, n, k, count):
            return 0.0
        depth = k + _FILL * (self.hardware.tile > 1)
        computed = _tiled(m, n, count, self.hardware) * 2 * depth / self._speed
        computed *= 1 + self.hardware.half_dim / min(m, n, k)
        size = self.element * count * (m * k + k * n + m * n)
        return max(computed, size / self._memory) + self.hardware.kernel_us * 1e-6

    def _issued(self, costs: list[tuple[float, int]], graphs: int | None) -> float:
        """Of (seconds, kernels): the device is busy with them, or waits for the host, which launches them."""
        seconds, kernels = (sum(column) for column in zip((0.0, 0), *costs, strict=True))
        hardware = self.hardware
        host_us = kernels * hardware.launch_us if graphs is None else graphs * hardware.graph_us
        host = host_us * 1e-6
        return seconds + host if hardware.waits else max(seconds, host)

    def _forward(self, kernel: Kernel) -> tuple[float, int]:
        if isinstance(kernel, Product):
            return self.product(kernel.m, kernel.n, kernel.k, kernel.count), 1
        if isinstance(kernel, AttentionKernel):
            return self._attention(kernel, 1.0), _ATTENTION_KERNELS[0]
        size = kernel.forward / (self.hardware.fused_rate if kernel.fused else 1.0)
        return self.moved(size, kernel.kernels[0], kernel.exponentials[0]), kernel.kernels[0]

    def _input(self, kernel: Kernel) -> tuple[float, int]:
        if isinstance(kernel, Product):
            m, n, k, count = kernel[:4]
            seconds = self.product(m, k, n, count)
            return (seconds, 1) if kernel.weight else (seconds + self.product(k, n, m, count), 2)
        if isinstance(kernel, AttentionKernel):
            return self._attention(kernel, _ATTENTION_BACKWARD), _ATTENTION_KERNELS[1]
        rate = self.hardware.fused_rate if kernel.fused else 1.0
        size = ((kernel.backward - kernel.columns - kernel.scattered) / rate
                + kernel.columns / self.hardware.column_efficiency
                + kernel.scattered / self.hardware.scatter_efficiency)
        return self.moved(size, kernel.kernels[1], kernel.exponentials[1]), kernel.kernels[1]

    def _weight(self, kernel: Kernel) -> tuple[float, int]:
        if isinstance(kernel, Product) and kernel.weight is True:
            return self.product(kernel.n, kernel.k, kernel.m, kernel.count), 1
        return 0.0, 0

    def _attention(self, kernel: AttentionKernel, times: float) -> float:
        hardware = self.hardware
        squares, keys = kernel.squares, kernel.keys or kernel.seq
        if hardware.attention_passes:
            # Products of the whole square, and passes over it.
            products = 2 * (1 if times == 1.0 else 2) * self.product(
                kernel.seq, keys, kernel.size, kernel.sequences * kernel.heads)
            passes = hardware.attention_passes * (1.0 if times == 1.0 else _PASSES_BACKWARD)
            return products + self.moved(round(passes * squares * self.element), round(passes))
        speed = hardware.peak(self.element) * hardware.attention_efficiency
        speed *= kernel.size / (kernel.size + hardware.attention_half_size)
        speed *= hardware.attention_backward if times != 1.0 else 1.0
        rows = kernel.sequences * kernel.size * 2 * (kernel.seq * kernel.heads + keys * kernel.kv_heads)
        # Backward computes the softmax again.
        computed = times * kernel.flops / 2 / speed + self._exponentials(squares)
        return max(computed, times * rows * self.element / self._memory) + hardware.kernel_us * 1e-6


@lru_cache(1 << 14)
def _tiled(m: int, n: int, count: int, hardware: Hardware) -> float:
    """Numbers of a product that are computed, with those of tiles and waves that are not full. Tiles become
    smaller where there are too few of them; smaller ones reuse less, which `efficiency` does not say."""
    if hardware.tile == 1:
        return float(m * n * count)
    best = math.inf
    for high, wide, penalty in _TILES:
        high, wide = round(high * hardware.tile), round(wide * hardware.tile)
        tiles = math.ceil(m / high) * math.ceil(n / wide) * count
        waves = math.ceil(tiles / hardware.units)
        best = min(best, penalty * waves * hardware.units * high * wide)
    return best


# Steps along k that it takes to fill a tile's pipeline and to write its numbers.
_FILL = 64
# Shapes of a tile in units of `tile`, and how much slower each computes a number than the first.
_TILES = ((2, 1, 1.0), (1, 2, 1.0), (1, 1, 1.1), (1, 0.5, 1.3), (0.5, 0.5, 1.6))


class Travel:
    """Seconds of collectives and messages of ranks at a place."""

    def __init__(self, hardware: Hardware):
        self.hardware = hardware

    def ring(self, sent: int, place: GroupPlace, calls: int = 1) -> float:
        """Of collectives in which a rank sends so many bytes, over a ring of all ranks."""
        if place.ranks == 1 or not sent:
            return 0.0
        hops = (place.ranks - place.nodes) * self._inside_s + (place.nodes - 1) * self._outside_s * (
            place.nodes > 1)
        return sent / self._ring_speed(place) + calls * hops

    def all_reduce(self, sent: int, place: GroupPlace, calls: int = 1) -> float:
        """Of all-reduces in which a rank sends so many bytes by the ring's formula: 2 S (n-1)/n."""
        if place.ranks == 1 or not sent:
            return 0.0
        flat = self.ring(sent, place, 2 * calls)
        if place.nodes == 1:
            return min(flat, self._tree(sent, place, calls))
        size = sent * place.ranks / (place.ranks - 1) / 2
        each, nodes = place.together, place.nodes
        inside = 2 * size * (each - 1) / each / self._inside_speed if each > 1 else 0.0
        outside = 2 * size * (nodes - 1) / nodes / self._outside_speed(place)
        # Both run at the same time, on parts of the message.
        hops = 2 * (each * self._inside_s + math.ceil(math.log2(nodes)) * self._outside_s)
        return min(flat, max(inside, outside) + calls * hops)

    def all_to_all(self, sent: int, place: GroupPlace, calls: int = 1) -> float:
        """Of all-to-alls in which a rank sends so many bytes, equally many to each: those for its own node
        and those for others at the same time, each `exchange_efficiency` times as fast as a ring."""
        if place.ranks == 1 or not sent:
            return 0.0
        inside = sent * (place.together - 1) / (place.ranks - 1)
        seconds = inside / self._inside_speed
        if place.nodes > 1:
            # `_outside_speed` is of all ranks of the group on a node
            seconds = max(seconds, (sent - inside) * place.together / self._outside_speed(place))
        hops = calls * (self._outside_s if place.nodes > 1 else self._inside_s)
        return seconds / self.hardware.exchange_efficiency + hops

    def message(self, size: int, far: bool) -> float:
        """Of a message to a device of another node, or of the same."""
        if not size:
            return 0.0
        hardware = self.hardware
        speed = (hardware.adapters * hardware.adapter_gbps * 1e9 / 8 * hardware.adapter_efficiency
                 / hardware.devices if far else self._inside_speed)
        return size / min(speed, self._inside_speed) + (self._outside_s if far else self._inside_s)

    def _tree(self, sent: int, place: GroupPlace, calls: int) -> float:
        """Small messages inside a node go up and down a tree."""
        size = sent * place.ranks / (place.ranks - 1)
        return size / self._inside_speed + calls * 2 * math.ceil(math.log2(place.ranks)) * self._inside_s

    @property
    def _inside_speed(self) -> float:
        return self.hardware.node_gbps * 1e9 / 8 * self.hardware.node_efficiency

    def _outside_speed(self, place: GroupPlace) -> float:
        """Bytes a second that all ranks of the group on a node send to other nodes: other groups of the node
        use the adapters at the same time."""
        hardware = self.hardware
        node = hardware.adapters * hardware.adapter_gbps * 1e9 / 8 * hardware.adapter_efficiency
        return min(node * place.together / hardware.devices, place.together * self._inside_speed)

    def _ring_speed(self, place: GroupPlace) -> float:
        if place.nodes == 1:
            return self._inside_speed
        outside = self._outside_speed(place)
        return min(outside, self._inside_speed) if place.together > 1 else outside

    @property
    def _inside_s(self) -> float:
        return self.hardware.node_us * 1e-6

    @property
    def _outside_s(self) -> float:
        return self.hardware.adapter_us * 1e-6
