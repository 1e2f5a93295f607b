"""One process captures, compiles and checks for all; each of the others is sent its own part."""

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
    """The way of plans and kernels from the first process to the others.

    A kernel goes to a process once: what was compiled anew comes as a plan, and finds it there.
    """

    def __init__(self, fused: bool) -> None:
        self.fused = fused  # kernels go through Inductor, where they are needed
        self.kernels = Kernels()  # that came from the first process
        self.sent: dict[Device, set[Key]] = {}

    def first(self, make: Make) -> tuple[Assignment, Kernels]:
        """Compile, and send every other process its part; or tell all why there is none."""
        try:
            captured, compiled = make()
            found = {one.plan.device: one for one in assignments(captured, compiled)}
            parcels = self.parcels(found, captured.kernels)
        except Exception as error:
            broadcast_text(json.dumps({"refused": as_row(error)}))
            raise
        broadcast_text(shared_json(found[FIRST]))
        send_texts(parcels)
        for device in parcels:
            self.sent.setdefault(device, set()).update(self.keys(found[device]))
        return found[FIRST], captured.kernels

    def other(self) -> tuple[Assignment, Kernels]:
        """What the first process sends to this one."""
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

    def parcels(self, found: Mapping[Device, Assignment], kernels: Kernels) -> dict[Device, str]:
        """For each of the others, its assignment and the kernels that it does not have yet."""
        text = cache(kernels.to_json)
        parcels = {}
        for device, one in found.items():
            if device != FIRST:
                there = self.sent.get(device, set())
                new = [key for key in self.keys(one) if key not in there]
                texts = [(code, phase, text(code, phase, fused)) for code, phase, fused in new]
                parcels[device] = json.dumps([own_json(one), *texts])
        return parcels


def as_row(error: Exception) -> list[Any]:
    """
    >>> as_row(errors.InputError("batch", Problem("it is empty", "give it rows")))
    ['InputError', 'batch', [('it is empty', 'give it rows')]]
    """
    if isinstance(error, Located):
        problems = [(problem.what, problem.fix) for problem in error.problems]
        return [type(error).__name__, error.where, problems]
    return [type(error).__name__, str(error), None]


def error_of(kind: str, where: str, problems: list[tuple[str, str]] | None) -> Exception:
    """The same error again; of what is not known here, its name and its text.

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
