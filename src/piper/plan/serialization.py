"""Plans as JSON, without pickle: the same bytes for the same plan."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, get_args

from piper.names import Share
from piper.plan.instructions import Instruction, Plan, State

KINDS: dict[str, type[Instruction]] = {
    kind.__name__.lower(): kind for kind in get_args(Instruction)
}


def to_json(plan: Plan) -> str:
    """One instruction per line."""
    head: dict[str, Any] = {
        "device": plan.device,
        "states": [field_values(state) for state in plan.states],
    }
    head["buffers"] = plan.buffers
    if plan.streams:
        head["streams"] = [field_values(share) for share in plan.streams]
    lines = [
        json.dumps([type(one).__name__.lower(), *field_values(one)]) for one in plan.instructions
    ]
    body = ",\n  ".join(lines)
    return f'{json.dumps(head)[:-1]}, "instructions": [\n  {body}\n]}}\n'


def from_json(text: str) -> Plan:
    data = json.loads(text)
    return Plan(
        data["device"],
        tuple(State(*map(frozen, state)) for state in data["states"]),
        tuple(KINDS[kind](*map(frozen, values)) for kind, *values in data["instructions"]),
        tuple(data["buffers"]),
        tuple(Share(*share) for share in data.get("streams", ())),
    )


def field_values(record: Any) -> list[Any]:
    return [getattr(record, field.name) for field in fields(record)]


def frozen(value: Any) -> Any:
    """JSON has lists where plans have tuples."""
    return tuple(map(frozen, value)) if isinstance(value, list) else value
