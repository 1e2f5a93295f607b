"""HSDP (PyTorch) and MiCS (Zhang et al., VLDB 2022): shard within a node, replicate across nodes.

    piper run examples/literature/hsdp.py -n 4

Parameters are gathered within a group, over its fast links. Gradients are reduce-scattered within
it too, and all-reduced across groups, a shard each.
"""

from train import train

from piper import Place, Replicate, Split, Stage, Strategy, where


def strategy(groups: int = 2, size: int = 2, microbatches: int = 2) -> Strategy:
    nodes = [list(range(node * size, (node + 1) * size)) for node in range(groups)]
    place = Place(where(), [device for node in nodes for device in node])
    replicate = Replicate(where(), nodes, zero=3)
    return Strategy([Stage("PP", 1), place, replicate, Split("MB", microbatches)])


if __name__ == "__main__":
    train(strategy())
