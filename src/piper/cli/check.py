"""piper check: prove a strategy before it runs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from piper.cli.numerics_report import numerics_report
from piper.cli.passed_on import add_command, refuse_arguments
from piper.cli.target import Target, inspect, strategy_of
from piper.cli.terminal import show_text, window_of
from piper.cli.usage import gibibytes
from piper.errors import Refused
from piper.names import amount
from piper.plan.check.proof import Proof, prove
from piper.view.reports.footprint import size_text

if TYPE_CHECKING:
    from piper.job.compile.compiler import Compiled
    from piper.job.inspection import Inspected

Memory = Annotated[
    float | None,
    typer.Option(
        parser=gibibytes, metavar="FLOAT", help="check that it fits in this many GiB per device"
    ),
]


def add_to(app: typer.Typer) -> None:
    add_command(app, "check", check)


def check(
    context: typer.Context,
    target: Target,
    numerics: Annotated[
        bool,
        typer.Option("--numerics", help="train a few steps with and without Piper, and compare"),
    ] = False,
    steps: Annotated[
        int | None, typer.Option(min=1, help="steps of --numerics [default: 3]")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="seed of the data of --numerics")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="show every parameter of --numerics")
    ] = False,
    memory: Memory = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Check TARGET: compile a script's strategy for its model, or read a .json or .csv file.

    Exit code 0: every rewrite gave a valid DAG, and the plans do not deadlock and do not lose,
    duplicate or swap anything. With --numerics, losses, gradients and parameters also equal those
    of plain PyTorch. With --memory, it also fits in the memory of a device, which this machine need
    not have. 1: one of these does not hold. 2: wrong usage.

    Arguments after TARGET are passed on to the script. Write `--` before options of the script that
    are named like these.

    Example: piper check train.py --numerics --memory 80
    """
    refuse_misplaced(numerics, steps=steps, seed=seed, all=every or None)
    if target.suffix in (".json", ".csv"):
        refuse_misplaced(False, numerics=numerics or None, memory=memory)
        refuse_arguments(target, context.args)
        check_file(target, as_json)
        return
    try:
        inspected = inspect(target, context.args, memory)
        proof = proof_of(inspected.compiled)
        room = Room.of(inspected) if memory is not None else None
        if room is not None and not as_json:
            print(room)
        if numerics:
            compared(inspected, proof, room, steps or 3, seed or 0, every, as_json)
        else:
            show_proof(proof, room, as_json)
    except Refused as refused:
        if as_json:
            where = getattr(refused, "where", "")
            print(as_text(ok=False, where=where, problems=[asdict(p) for p in refused.problems]))
        raise


def check_file(target: Path, as_json: bool) -> None:
    count = len(strategy_of(target))
    rows = "; every pass is there once, and no row waits forever" if is_table(target) else ""
    text = f"ok: {amount(count, 'directive')}, readable and consistent{rows}"
    print(as_text(ok=True, directives=count) if as_json else text)


def is_table(target: Path) -> bool:
    return target.suffix == ".csv"


def proof_of(compiled: Compiled) -> Proof:
    return prove(compiled.dag, compiled.plans, compiled.roles.first)


@dataclass(frozen=True)
class Room:
    """What the fullest device needs. A strategy that needs more than there is was an error."""

    device: int
    bytes: int
    limit: int

    @staticmethod
    def of(inspected: Inspected) -> Room:
        from piper.job.memory.memory_limit import fullest, require_limit

        limit = require_limit(inspected.job.memory)
        return Room(*fullest(limit.peaks(inspected.compiled)), limit.bytes)

    def __str__(self) -> str:
        needed, limit = size_text(self.bytes), size_text(self.limit)
        return f"fits: device {self.device} needs {needed} of {limit}"


def show_proof(proof: Proof, room: Room | None = None, as_json: bool = False) -> None:
    if as_json:
        print(proved_text(proof, room))
    else:
        show_text(str(proof), window_of(None, None))
    sys.stdout.flush()


def proved_text(proof: Proof, room: Room | None, ok: bool = True, **found: object) -> str:
    """In JSON."""
    memory = {} if room is None else {"memory": asdict(room)}
    return as_text(ok=ok, proof=asdict(proof), **memory, **found)


def compared(
    inspected: Inspected, proof: Proof, room: Room | None, steps: int, seed: int, every: bool,
    as_json: bool,
) -> None:  # fmt: skip
    from piper.job.numerics import compare

    if not as_json:
        show_proof(proof)
    with Console(stderr=True).status(f"training {amount(steps, 'step')} with Piper and without"):
        found = compare(
            inspected.job, inspected.example, inspected.captured, inspected.compiled, steps, seed
        )
    if as_json:
        print(proved_text(proof, room, found.agrees, numerics=asdict(found)))
    else:
        terminal = Console()
        console = terminal if terminal.is_terminal else Console(width=160)
        for piece in numerics_report(found, every):
            if isinstance(piece, str):
                show_text(piece, window_of(None, None))
            else:
                console.print(piece, highlight=False)
    if not found.agrees:
        raise typer.Exit(1)


def as_text(**found: Any) -> str:
    """JSON. Differences that are not finite become null."""
    return json.dumps(finite(found), allow_nan=False)


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def refuse_misplaced(allowed: bool, **given: object) -> None:
    """An option that does not apply here was probably meant for the script."""
    for name, value in given.items():
        if value is not None and not allowed:
            of_script = name in ("numerics", "memory")
            what = "it needs a script (.py): a file of directives has no model"
            if not of_script:
                what = "it needs --numerics; to pass it to the script, write it after `--`"
            raise typer.BadParameter(what, param_hint=f"--{name}")
