"""The first process compiles for all, and sends every other process its part."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from piper import errors
from piper.capture import Captured
from piper.capture.kernels.callables import Kernels, Key
from piper.errors import CaptureError, Located, Problem
from piper.job.assignment import Assignment, assignments, from_json, own_json, shared_json
from piper.job.compiler import Compiled
from piper.names import Device, Phase
from piper.runtime.comm.broadcast_text import FIRST, broadcast_text, receive_text, send_texts

Make = Callable[[], tuple[Captured, Compiled]]
PLAIN = (
    "ArithmeticError", "AssertionError", "AttributeError", "IndexError", "KeyError", "MemoryError",
    "NameError", "NotImplementedError", "OSError", "RuntimeError", "TypeError", "ValueError",
)  # fmt: skip


class PlanShipping:
    """Sends plans and kernels from the first process to the others.

    Every kernel is sent to a process once. A strategy that is compiled again needs a new plan only.
    """

    def __init__(self, fused: bool) -> None:
        self.fused = fused  # kernels are compiled by Inductor on the receiver
        self.kernels = Kernels()  # received from the first process
        self.sent: dict[Device, set[Key]] = {}

    def first(self, make: Make) -> tuple[Assignment, Kernels]:
        """Compile, and send every other process its part, or the error."""
        try:
            captured, compiled = make()
            found = {one.plan.device: one for one in assignments(captured, compiled)}
            shipments = self.shipments(found, captured.kernels)
        except Exception as error:
            broadcast_text(json.dumps({"refused": error_fields(error)}))
            raise
        broadcast_text(shared_json(found[FIRST]))
        send_texts(shipments)
        for device in shipments:
            self.sent.setdefault(device, set()).update(self.keys(found[device]))
        return found[FIRST], captured.kernels

    def other(self) -> tuple[Assignment, Kernels]:
        """Receive the part of this process."""
        shared = broadcast_text()
        refused = json.loads(shared).get("refused")
        if refused is not None:
            raise error_of(*refused)
        own, *kernels = json.loads(receive_text())
        for code, phase, text in kernels:
            self.kernels.add(code, Phase(phase), self.fused, text)
        return from_json(shared, own), self.kernels

    def keys(self, one: Assignment) -> list[Key]:
        """The kernels that a device runs, each once."""
        keys = ((one.regions[name].graph, phase, self.fused) for name, phase in one.runs)
        return list(dict.fromkeys(keys))

    def shipments(self, found: Mapping[Device, Assignment], kernels: Kernels) -> dict[Device, str]:
        """For each of the others, its assignment and the kernels that it does not have yet."""
        text = cache(kernels.to_json)
        shipments = {}
        for device, one in found.items():
            if device != FIRST:
                there = self.sent.get(device, set())
                new = [key for key in self.keys(one) if key not in there]
                texts = [(code, phase, text(code, phase, fused)) for code, phase, fused in new]
                shipments[device] = json.dumps([own_json(one), *texts])
        return shipments


def error_fields(error: Exception) -> list[Any]:
    """
    >>> error_fields(errors.InputError("batch", Problem("it is empty", "give it rows")))
    ['InputError', 'batch', [('it is empty', 'give it rows')]]
    """
    if isinstance(error, Located):
        problems = [(problem.what, problem.fix) for problem in error.problems]
        return [type(error).__name__, error.where, problems]
    return [type(error).__name__, str(error), None]


def error_of(kind: str, where: str, problems: list[tuple[str, str]] | None) -> Exception:
    """The same error. Of a class that is not known here, its name and text.

    >>> error_of("ValueError", "too many", None)
    ValueError('too many')
    >>> errors.is_echo(error_of("ValueError", "too many", None))
    True
    >>> error_of("Lost", "nowhere", None)
    RuntimeError('Lost: nowhere')
    """
    if problems is not None:
        found: Exception = getattr(errors, kind, CaptureError)(
            where, *(Problem(*row) for row in problems)
        )
    elif kind in PLAIN:
        found = getattr(builtins, kind)(where)
    else:
        found = RuntimeError(f"{kind}: {where}")
    found.add_note(errors.ECHO)
    return found
