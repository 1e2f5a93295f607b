"""Small DAGs and plans as they print; a change shows as a diff."""

from collections.abc import Callable

import pytest
from divided import SEQUENCE_PARALLEL, divided_chain
from synthetic import chain

from piper.directives import Order, Place, Replicate, Shard, Split
from piper.ir.filters import where
from piper.ir.text.text import text
from piper.job.compile.compiler import Compiled, compile_strategy

Golden = Callable[[str, str], None]


def plain() -> Compiled:
    """Two stages, two microbatches, no order."""
    places = [Place(where(PP=0), [0]), Place(where(PP=1), [1])]
    return compile_strategy(chain(2), [*places, Split("MB", 2)])


def rich() -> Compiled:
    """Three stages on two devices: a skip, tied parameters, clipping, split backwards."""
    places = [Place(where(PP=k), [k % 2]) for k in range(3)]
    slots = [
        where(PP=1, MB=0, PASS="F"),
        where(PP=1, MB=1, PASS="F"),
        where(PP=1, MB=0, PASS="BI"),
        [where(PP=1, MB=0, PASS="BW"), where(PP=1, MB=1, PASS="BI")],
        where(PP=1, MB=1, PASS="BW"),
    ]
    model = chain(3, skips=((0, 2),), tied=True)
    return compile_strategy(model, [*places, Split("MB", 2), Order(slots)], clip=True)


def replicated() -> Compiled:
    """Two replicas of two stages: one keeps all its parameters, the other one gathers them."""
    places = [Place(where(PP=0), [0, 2]), Place(where(PP=1), [1, 3])]
    replicates = [
        Replicate(where(PP=0), [0, 2], zero=3, gather_stream="gather"),
        Replicate(where(PP=1), [1, 3], zero=0),
    ]
    return compile_strategy(chain(2), [*places, *replicates, Split("MB", 2)])


def divided() -> Compiled:
    """Two devices divide a region, with cut tokens between its pieces; backwards are ordered."""
    slots = [where(MB=0, PASS="F"), [where(MB=1, PASS="F"), where(MB=0, PASS="B")],
             where(MB=1, PASS="B")]  # fmt: skip
    program = [Place(where(), [0, 1]), Shard(where(), [0, 1], what="weights"), Split("MB", 2)]
    return compile_strategy(divided_chain(steps=SEQUENCE_PARALLEL), [*program, Order(slots)])


ALL = [plain, rich, replicated, divided]


@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_plans_print_as_they_did(make: Callable[[], Compiled], golden: Golden) -> None:
    plans = make().plans

    golden(f"plans_{make.__name__}.txt", "\n\n".join(map(str, plans)) + "\n")


@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_dags_print_as_they_did(make: Callable[[], Compiled], golden: Golden) -> None:
    dag = make().dag

    golden(f"dag_{make.__name__}.txt", text(dag))
