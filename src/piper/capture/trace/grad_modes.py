"""Which operations ran under no_grad and autocast. Each region repeats the modes of its part."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from piper.capture.torch_private import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD_ENABLED


@dataclass(frozen=True, slots=True)
class Mode:
    grad: bool = True
    autocast: tuple[tuple[Any, ...], ...] = ()  # arguments of each, outermost first


def modes_of(graph: fx.Graph) -> dict[fx.Node, Mode]:
    """The mode of each operation. The mode switches themselves are left out."""
    mode = Mode()
    modes = {}
    for node in graph.nodes:
        if node.target is SET_GRAD_ENABLED:
            mode = Mode(bool(node.args[0]), mode.autocast)
        elif node.target is ENTER_AUTOCAST:
            mode = Mode(mode.grad, (*mode.autocast, tuple(node.args)))
        elif node.target is EXIT_AUTOCAST:
            mode = Mode(mode.grad, mode.autocast[:-1])
        elif node.op in ("call_function", "get_attr"):
            modes[node] = mode
    return modes


class Switch:
    """Writes mode switches into a graph under construction."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph, self.mode = graph, Mode()
        self.entered: list[fx.Node] = []

    def to(self, mode: Mode) -> None:
        if mode.autocast != self.mode.autocast:
            while self.entered:
                self.graph.call_function(EXIT_AUTOCAST, (self.entered.pop(),))
            for arguments in mode.autocast:
                self.entered.append(self.graph.call_function(ENTER_AUTOCAST, arguments))
        if mode.grad != self.mode.grad:
            self.graph.call_function(SET_GRAD_ENABLED, (mode.grad,))
        self.mode = mode


@contextmanager
def autocast(mode: Mode) -> Iterator[None]:
    """While this is open, operators compute as they did in the trace."""
    with ExitStack() as stack:
        for device, dtype, enabled, cached in mode.autocast:
            stack.enter_context(torch.autocast(device, dtype, enabled, cached))
        yield
