"""Device lists of different lengths: every region gets as many replicas as any other."""

from __future__ import annotations

from dataclasses import replace

from piper.ir.dag import Dag
from piper.ir.placement.replicas import as_devices, stretched, team_size


def with_equal_lists(dag: Dag) -> Dag:
    """A region on fewer devices than others has several replicas on each of its devices.

    rewrite:
        F(PP=0) [0, 2]  ->  F(PP=1) [1]
        -->
        F(PP=0) [0, 2]  ->  F(PP=1) [1, 1]     device 1 runs replica 0, then replica 1

    Devices that divide regions stay together: [0, 1] becomes [0, 1, 0, 1].
    """
    given = dict.fromkeys(as_devices(node.devices) for node in dag.computes if node.devices)
    if len(set(map(len, given))) <= 1:
        return dag
    lists = stretched(given, team_size(dag.divided))
    return dag.with_nodes(
        replace(node, devices=lists[as_devices(node.devices)])
        for node in dag.computes
        if node.devices
    )
