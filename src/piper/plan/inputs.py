"""The buffers of loaded values: inputs, loss weights and random counters of each replica."""

from __future__ import annotations

from piper.ir.dag import Dag
from piper.ir.naming import replica_buffer
from piper.ir.placement.replicas import Replicas
from piper.ir.values import LOADED, Value


def input_buffers(dag: Dag, known: Replicas | None = None) -> dict[str, tuple[Value, int]]:
    """Buffer name -> value and replica. A device may hold several replicas."""
    count = (known or dag.replicas).parts
    return {
        replica_buffer(name, replica): (value, replica)
        for name, value in dag.values.items()
        if value.role in LOADED
        for replica in range(count)
    }
