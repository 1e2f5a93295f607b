"""What a step says of parameters that it uses in another way than the steps before."""

from __future__ import annotations

from collections.abc import Sequence

from piper.errors import InputError, some_names


def used_otherwise(names: Sequence[str], known: set[str]) -> InputError:
    """`known`: what the steps before have used."""
    listed = some_names(names)
    if known.isdisjoint(names):
        return InputError.of(
            "batch",
            f"this step uses {listed}, which no step before has used: the loop has changed the "
            "model since, or batches of this kind need more of it",
            "to go on with it, call save(...), and resume(...) with a new Trainer; if batches of "
            "several kinds come in turn, let all of them use the same parameters",
        )
    return InputError.of(
        "batch",
        f"batches of this shape use {listed} in another way than the batches before, or it was "
        "frozen (requires_grad), or its module was set to train() or eval(), as batch norm is",
        "use a Trainer for one way of using parameters; give numbers that choose between them the "
        "same value in every batch",
    )
