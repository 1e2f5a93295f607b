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
from piper.ir.by_device.roles import Roles
from piper.job.compile.assignment import (
    Assignment,
    RolePart,
    assigned,
    common_from_json,
    common_json,
    common_part,
    role_from_json,
    role_json,
    role_parts,
)
from piper.job.compile.compiler import Compiled
from piper.names import Device, Phase
from piper.runtime.processes.broadcast_text import FIRST, broadcast_text, relay_text

Make = Callable[[], tuple[Captured, Compiled]]
PLAIN = (
    "ArithmeticError", "AssertionError", "AttributeError", "IndexError", "KeyError", "MemoryError",
    "NameError", "NotImplementedError", "OSError", "RuntimeError", "TypeError", "ValueError",
)  # fmt: skip


class PlanShipping:
    """Sends plans and kernels from the first process to the others.

    All devices of a role get the same text, and make their own plans from it. A kernel is sent to a
    process once. A strategy that is compiled again needs new plans only.
    """

    def __init__(self, fused: bool) -> None:
        self.fused = fused  # kernels are compiled by Inductor on the receiver
        self.kernels = Kernels()  # received from the first process
        self.sent: dict[Device, set[Key]] = {}

    def first(self, make: Make) -> tuple[Assignment, Kernels]:
        """Compile, and send every other process its part, or the error."""
        try:
            captured, compiled = make()
            common, parts = common_part(captured, compiled), role_parts(captured, compiled)
            parcels = self.parcels(compiled.roles, parts, captured.kernels)
            text = common_json(common)
        except Exception as error:
            broadcast_text(json.dumps({"refused": error_fields(error)}))
            raise
        broadcast_text(text)
        for role, parcel in parcels.items():
            relay_text(parcel, receivers(compiled.roles, role))
            for device in compiled.roles.devices(role):
                self.sent.setdefault(device, set()).update(self.keys(parts[role]))
        return assigned(common, parts[compiled.roles.of[FIRST]], FIRST), captured.kernels

    def other(self, device: Device) -> tuple[Assignment, Kernels]:
        """Receive the part of this process."""
        text = broadcast_text()
        refused = json.loads(text).get("refused")
        if refused is not None:
            raise error_of(*refused)
        common = common_from_json(text)
        roles = common.groups.roles
        part, *kernels = json.loads(relay_text("", receivers(roles, roles.of[device])))
        for code, phase, kernel in kernels:
            self.kernels.add(code, Phase(phase), self.fused, kernel)
        return assigned(common, role_from_json(part), device), self.kernels

    def forget(self) -> None:
        """Send kernels again when they are needed. Programs keep those that they have."""
        self.kernels, self.sent = Kernels(), {}

    def keys(self, part: RolePart) -> list[Key]:
        """The kernels that devices of a role run, each once."""
        keys = ((part.regions[name].graph, phase, self.fused) for name, phase in part.runs)
        return list(dict.fromkeys(keys))

    def parcels(
        self, roles: Roles, parts: Mapping[Device, RolePart], kernels: Kernels
    ) -> dict[Device, str]:
        """For each role that other processes have: its part, and the kernels that some lack."""
        text = cache(kernels.to_json)
        parcels = {}
        for role, part in parts.items():
            others = receivers(roles, role)[1:]
            if others:
                there = set.intersection(*(self.sent.get(device, set()) for device in others))
                new = [key for key in self.keys(part) if key not in there]
                texts = [(code, phase, text(code, phase, fused)) for code, phase, fused in new]
                parcels[role] = json.dumps([role_json(part), *texts])
        return parcels


def receivers(roles: Roles, role: Device) -> list[Device]:
    """The processes that pass on the part of a role: first the one that has it."""
    return [FIRST, *(device for device in roles.devices(role) if device != FIRST)]


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
