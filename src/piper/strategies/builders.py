"""Builders of pipeline strategies: a well-known schedule, its replicas and its experts.

Every builder takes `pp`, the devices of one pipeline, `microbatches`, `dp`, the number of
replicas, and the keywords of `PipelineOptions`. Replica r of a stage is `r * pp` devices further,
unless `mesh` or `devices` says otherwise. `dp=[2, 4]` gives each rank its own number of devices,
numbered rank by rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, NoReturn, TypeVar, Unpack, cast

from piper.directives import Order, Strategy
from piper.directives.arguments import Slots
from piper.errors import Problem, StrategyError, no_option, wrong_call
from piper.strategies import schedules
from piper.strategies.assembly import assemble
from piper.strategies.check import check
from piper.strategies.export import table_of_orders
from piper.strategies.options import PipelineOptions
from piper.strategies.other_names import meant, no_schedule
from piper.strategies.pytorch_csv import parse_csv
from piper.strategies.schedules.sizes import require_possible, require_whole
from piper.strategies.schedules.table import Table, ranks_of
from piper.strategies.unequal_ranks import Replication

Builder = TypeVar("Builder", bound=Callable[..., Strategy])
COUNTS = ("tp", "cp", "ep", "zero", "gather_ahead")  # among the options of `assemble`

SCHEDULE_OPTIONS = ("schedule", "schedule_name", "pipeline_schedule", "schedule_class", "kind")


class NoBuilder(StrategyError, KeyError):
    """A name that no builder has."""


class Builders(dict[str, Callable[..., Strategy]]):
    """By the names that the command line takes."""

    def __missing__(self, name: object) -> NoReturn:
        raise NoBuilder("schedule", no_schedule(name, self))


BUILDERS = Builders()


def builder(name: str) -> Callable[[Builder], Builder]:
    """List a builder."""

    def register(build: Builder) -> Builder:
        full = signature(build)

        @wraps(build)
        def sized(*args: Any, **options: Any) -> Strategy:
            given = full.bind(*args, **options)
            given.apply_defaults()
            sizes = {size: n for size, n in given.arguments.items() if size != "options"}
            require_whole(name, **sizes, **{k: options[k] for k in COUNTS if k in options})
            require_possible(name, **sizes)
            return build(*args, **options)

        BUILDERS[name] = checked = naming_options(cast(Builder, sized))
        return checked

    return register


def naming_options(build: Builder) -> Builder:
    """A misspelled option gets the nearest name, and `help` shows all options."""
    full = with_options(signature(build, eval_str=True))

    @wraps(build)
    def checked(*args: Any, **options: Any) -> Strategy:
        for option in options:
            if option not in full.parameters:
                problem = no_option("a schedule", option, list(full.parameters))
                having = [name for name, one in BUILDERS.items() if option in names_of(one)]
                if option in ("microbatches", "pp"):
                    problem = Problem(
                        f"it was given {option}",
                        "leave it out: its orders or tables say how many there are",
                    )
                elif option in SCHEDULE_OPTIONS:
                    problem = of_schedule(option, options[option])
                elif having:
                    what = f"{build.__name__} has no option {option}"
                    problem = Problem(what, f"leave it out, or take {' or '.join(having)}")
                raise StrategyError("strategy", problem)
        if len(args) > 1 and all(isinstance(one, Order) for one in args):
            fix = f"write one list: {build.__name__}([first, last])"
            what = f"{build.__name__} was given {len(args)} orders"
            raise StrategyError.of("strategy", what, fix)
        if wrong := wrong_call(build.__name__, full, args, options):
            raise StrategyError("strategy", wrong)
        return build(*args, **options)

    checked.__signature__ = full  # type: ignore[attr-defined]
    return cast(Builder, checked)


def of_schedule(option: str, value: Any) -> Problem:
    """Here, every schedule has a builder of its own."""
    known = no_schedule(value, BUILDERS)
    names = [BUILDERS[one].__name__ for one in meant(str(value), BUILDERS)]
    calls = " or ".join(f"strategies.{name}(...)" for name in names)
    what = f"a schedule has no option {option}: each schedule is a builder of its own"
    return Problem(what, f"write {calls}" if names else known.fix)


def names_of(build: Builder) -> Sequence[str]:
    """Its options."""
    return list(signature(build).parameters)


def with_options(short: Signature) -> Signature:
    """The signature of a builder with the options of `assemble` in place of `**options`."""
    assembled = signature(assemble, eval_str=True).parameters.values()
    options = [option for option in assembled if option.kind is Parameter.KEYWORD_ONLY]
    own = [one for one in short.parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
    return short.replace(parameters=[*own, *options])


@builder("gpipe")
def gpipe(
    pp: int, microbatches: int, dp: Replication = 1, **options: Unpack[PipelineOptions]
) -> Strategy:
    """All forwards, then all backwards, of `pp` stages on as many devices."""
    return one_device_each(schedules.gpipe(pp, microbatches), dp, **options)


@builder("1f1b")
def one_f_one_b(
    pp: int, microbatches: int, dp: Replication = 1, **options: Unpack[PipelineOptions]
) -> Strategy:
    """One forward, one backward: as fast as GPipe, with fewer live activations.

    >>> print(one_f_one_b(pp=1, microbatches=1))
    Stage(name='PP', stages=1)
    Place(filter=where(PP=0), devices=(0,), stream='pp')
    Split(name='MB', n=1)
    Order(slots=((where(PP=0, MB=0, PASS='F'),), (where(PP=0, MB=0, PASS='B'),)))
    """
    return one_device_each(schedules.one_f_one_b(pp, microbatches), dp, **options)


@builder("interleaved-1f1b")
def interleaved_one_f_one_b(
    pp: int,
    microbatches: int,
    virtual: int = 2,
    dp: Replication = 1,
    **options: Unpack[PipelineOptions],
) -> Strategy:
    """1F1B of `pp * virtual` stages, stage s on device s % pp."""
    table = schedules.interleaved_one_f_one_b(pp, microbatches, virtual)
    return one_device_each(table, dp, **options)


@builder("zb-h1")
def zb_h1(
    pp: int, microbatches: int, dp: Replication = 1, **options: Unpack[PipelineOptions]
) -> Strategy:
    """1F1B whose weight gradients fill part of the bubble."""
    return one_device_each(schedules.zb_h1(pp, microbatches), dp, **options)


@builder("interleaved-zb")
def interleaved_zb(
    pp: int,
    microbatches: int,
    virtual: int = 2,
    dp: Replication = 1,
    **options: Unpack[PipelineOptions],
) -> Strategy:
    """ZB-H1 of `pp * virtual` stages, stage s on device s % pp."""
    return one_device_each(schedules.interleaved_zb(pp, microbatches, virtual), dp, **options)


@builder("zbv")
def zbv(
    pp: int, microbatches: int, dp: Replication = 1, **options: Unpack[PipelineOptions]
) -> Strategy:
    """Zero bubble for `2 * pp` stages, stage s on device min(s, 2*pp - 1 - s)."""
    return one_device_each(schedules.zbv(pp, microbatches), dp, **options)


@builder("dualpipev")
def dualpipev(
    pp: int, microbatches: int, dp: Replication = 1, **options: Unpack[PipelineOptions]
) -> Strategy:
    """Overlapped forwards and backwards for `2 * pp` stages, placed as for `zbv`.

    With experts (`ep`), the tokens of one pass travel while the other one computes.

    >>> print(dualpipev(pp=1, microbatches=2, dp=2, ep=2, zero=2).directives[5])
    Shard(filter=where(PP=0, EP='*'), devices=(0, 1), stream='ep')
    """
    return one_device_each(schedules.dualpipev(pp, microbatches), dp, **options)


@builder("dualpipe")
def dualpipe(
    pp: int, microbatches: int, dp: Replication = 1, **options: Unpack[PipelineOptions]
) -> Strategy:
    """Two replicas of `pp` stages in opposite directions: stage s on devices s and pp-1-s.

    The two share one batch, half each. `dp` counts such pairs.
    """
    table = schedules.dualpipe(pp, microbatches)
    mirrored = {stage: (stage, pp - 1 - stage) for stage in range(pp)}
    return assemble(table, mirrored, pp, dp, **options)


@naming_options
def from_csv(text: str, dp: Replication = 1, **options: Unpack[PipelineOptions]) -> Strategy:
    """The strategy of a schedule in PyTorch's CSV format, one line per device of a pipeline.

    It takes the text of a file: `Path("schedule.csv").read_text()`.

    >>> from_csv("0F0,0B0", dp=2, zero=3) == one_f_one_b(pp=1, microbatches=1, dp=2, zero=3)
    True
    """
    return from_table(parse_csv(text), dp, **options)


@naming_options
def from_table(table: Table, dp: Replication = 1, **options: Unpack[PipelineOptions]) -> Strategy:
    """The strategy of a schedule, rank r on device r. The table is checked first."""
    check(table)
    return one_device_each(table, dp, **options)


@naming_options
def from_orders(
    orders: Sequence[Order | Slots] | Order,
    dp: Replication = 1,
    **options: Unpack[PipelineOptions],
) -> Strategy:
    """The strategy of your own orders, or lists of slots, one for each device of a pipeline.

    They name passes of stages, `where(PP=0, MB=0, PASS="F")`. Everything else comes from the
    options of a builder: stages, places, replicas, ZeRO and experts.

    >>> from piper.ir.filters import where
    >>> slots = [where(PP=0, MB=0, PASS="F"), where(PP=0, MB=0, PASS="B")]
    >>> from_orders([Order(slots)], dp=2) == one_f_one_b(pp=1, microbatches=1, dp=2)
    True
    """
    each = [orders] if isinstance(orders, Order) else orders
    made = [one if isinstance(one, Order) else Order(one) for one in each]
    with problems_of_orders():
        built = from_table(table_of_orders(made), dp, **options)
    return Strategy(one for one in built if not isinstance(one, Order)) + made


@contextmanager
def problems_of_orders() -> Iterator[None]:
    """Problems of a schedule have its short notation: say what it means here."""
    try:
        yield
    except StrategyError as error:
        if error.where != "schedule":
            raise
        first, *others = error.problems
        where = 'where(PP=0, MB=0, PASS="F")'
        fix = f"{first.fix} (0F0 means {where}, and rank 0 is the device of the first order)"
        raise StrategyError("orders", Problem(first.what, fix), *others) from None


def one_device_each(
    table: Table, dp: Replication = 1, **options: Unpack[PipelineOptions]
) -> Strategy:
    """Rank r of the table on device r."""
    places = {stage: (rank,) for stage, rank in ranks_of(table).items()}
    return assemble(table, places, len(table.rows), dp, **options)
