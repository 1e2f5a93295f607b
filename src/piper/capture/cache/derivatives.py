"""Derivatives of regions that this or an earlier process has made.

The key is the region's own graph, as it was traced in this process, with all that torch asks for
when it differentiates it. So a model, its configuration, its globals and everything else that a
forward reads need not be known: if they matter, they are in the graph.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import fx

from piper.capture.cache.folder import CacheFolder, folder_in
from piper.capture.cache.joint_text import NotStorable, from_text, is_derivative_of, to_text
from piper.capture.cache.surroundings import surroundings
from piper.capture.graphs.joint import Joint
from piper.capture.graphs.recomputation import checkpoint_of
from piper.capture.kernels.allowed_calls import name_of
from piper.capture.torch_private import MODE_SWITCHES, is_plain
from piper.capture.trace.custom_functions import is_function
from piper.errors import CaptureError

LOG = logging.getLogger("piper")
Flags = tuple[bool, ...]
TwoFlags = tuple[Flags, Flags]  # which arguments require a gradient, which results get one


@dataclass
class Derivatives:
    """Of the regions of one model. Without a folder, each is made."""

    mode: Any  # the fake mode of the values in joint graphs
    folder: CacheFolder | None = None
    around: str = ""

    def flags(
        self, graph: fx.GraphModule, name: str, wants: Flags, make: Callable[[], Flags]
    ) -> Flags:
        """Which results depend on arguments that require a gradient."""
        key = self.key("flags", graph, name, wants)
        text = self.read(key)
        if text is not None:
            found = flags_in(text)
            if found is not None and len(found) == len(results_of(graph)):
                return found
        made = make()
        self.write(key, json.dumps(made))
        return made

    def joint(
        self, graph: fx.GraphModule, name: str, flags: TwoFlags, make: Callable[[], Joint]
    ) -> Joint:
        key = self.key("joint", graph, name, flags)
        text = self.read(key)
        found = None if text is None else self.parsed(text, graph)
        if found is not None:
            return replace(found, was_read=True, entry=key)
        made = make()
        is_kept = key is not None and self.store(key, graph, made)
        return replace(made, entry=key) if is_kept else made

    def key(self, kind: str, graph: fx.GraphModule, name: str, given: Any) -> str | None:
        """`name` is the fingerprint of the graph. None: the graph does not say all."""
        if self.folder is None or not says_all(graph):
            return None
        text = repr((kind, name, checkpoints(graph), given, self.around))
        return hashlib.sha256(text.encode()).hexdigest()

    def read(self, key: str | None) -> str | None:
        return None if key is None or self.folder is None else self.folder.read(key)

    def write(self, key: str | None, text: str) -> None:
        if key is not None and self.folder is not None:
            self.folder.write(key, text)

    def parsed(self, text: str, graph: fx.GraphModule) -> Joint | None:
        """The joint graph of a text, or None if it is not one of this graph."""
        try:
            found = from_text(text, self.mode)
            return found if is_derivative_of(found, graph) else None
        except Exception as error:  # written by hand, or by another version
            LOG.debug("an entry of the cache is ignored: %s", error)
            return None

    def store(self, key: str, graph: fx.GraphModule, made: Joint) -> bool:
        """Write what can be read again as it is. Returns whether it can."""
        try:
            text = to_text(made)
        except (NotStorable, CaptureError) as error:
            LOG.debug("a region is not cached: %s", error)
            return False
        again = self.parsed(text, graph)
        same = again is not None and to_text(again) == text
        if same:
            self.write(key, text)
        return same


def derivatives(mode: Any, device: str) -> Derivatives:
    """With the folder of this process, if everything that matters can be told."""
    folder = folder_in()
    around = None if folder is None else surroundings(device)
    return Derivatives(mode) if around is None else Derivatives(mode, folder, around)


def says_all(graph: fx.GraphModule) -> bool:
    """Whether its derivative is torch's or Piper's own: that of the user may change."""
    calls = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    try:
        for target in calls:
            _ = target in MODE_SWITCHES or name_of(target)
    except CaptureError:
        return False
    return is_plain(graph.graph) and not any(map(is_function, calls))


def checkpoints(graph: fx.GraphModule) -> tuple[int | None, ...]:
    """Which nodes are inside which torch.utils.checkpoint, numbered as they come."""
    numbers: dict[int, int] = {}
    number = partial(_numbered, numbers)
    return tuple(number(checkpoint_of(node)) for node in graph.graph.nodes)


def _numbered(numbers: dict[int, int], found: int | None) -> int | None:
    return None if found is None else numbers.setdefault(found, len(numbers))


def flags_in(text: str) -> Flags | None:
    """
    >>> flags_in("[true, false]"), flags_in("[1]"), flags_in("{")
    ((True, False), None, None)
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    fits = isinstance(found, list) and all(type(one) is bool for one in found)
    return tuple(found) if fits else None


def results_of(graph: fx.GraphModule) -> Sequence[Any]:
    results: Any = graph.graph.output_node().args[0]
    return list(results)
