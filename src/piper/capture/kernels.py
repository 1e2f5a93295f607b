"""Graphs as functions that the runtime calls."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from piper.capture.fastcode import quickened
from piper.names import Phase

Kernel = Callable[..., tuple]


@dataclass
class Kernels:
    """The functions of all regions, made when first asked for; equal code is made once."""

    graphs: dict[str, dict[Phase, fx.GraphModule]]
    made: dict[tuple[str, Phase, bool], Kernel] = field(default_factory=dict)

    def get(self, code: str, phase: Phase, compiled: bool) -> Kernel:
        key = code, phase, compiled
        if key not in self.made:
            self.made[key] = _make(self.graphs[code][phase], compiled)
        return self.made[key]


def numbered(kernel: Kernel, position: int, first: int) -> Kernel:
    """A kernel whose dropouts count from `first`: equal regions differ in this alone."""

    def call(*reads: Any) -> tuple:
        random = functional.pad(reads[position], (0, 1), value=first)
        return kernel(*reads[:position], random, *reads[position + 1 :])

    return call


def _make(graph: fx.GraphModule, compiled: bool) -> Kernel:
    if compiled:
        return torch.compile(graph, dynamic=False, fullgraph=True)
    return quickened(graph).forward
