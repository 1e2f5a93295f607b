"""Orders of messages between real processes, which wait for each other over sockets."""

from __future__ import annotations

from pool import run_on
from replicas import assert_same, plain, train_all

from piper import Order, where
from piper.strategies import one_f_one_b

STAGES, MICROBATCHES, ROWS = 2, 2, 8
LAST = MICROBATCHES - 1
SENDS = Order([where(PP=0, MB=1, PASS="F"), where(PP=0, MB=0, PASS="SEND", OF="F")])
ARRIVALS = Order([where(PP=1, MB=1, PASS="RECV"), where(PP=1, MB=LAST, PASS="F")])
LATE = Order([where(PP=1, MB=LAST, PASS="SEND"), where(PP=1, PASS="REDUCE")])
BESIDE = Order([where(PP=0, MB=0, PASS="REDUCE"), where(PP=0, MB=1, PASS="B")])
ELSEWHERE = Order([where(PP=0, MB=LAST, PASS="B"), where(PP=1, PASS="UPDATE")])
NEXT = Order([where(PP=1, PASS="UPDATE"), where(PP=0, MB=0, PASS="F", STEP=1)])
ORDERS = {
    0: (SENDS, ARRIVALS, LATE), 1: (LATE, ELSEWHERE), 2: (SENDS, BESIDE, NEXT),
    3: (BESIDE, ARRIVALS, ELSEWHERE, NEXT),
}  # fmt: skip


def test_processes_keep_orders_of_messages() -> None:
    strategies = [
        one_f_one_b(pp=STAGES, dp=2, microbatches=MICROBATCHES, zero=zero) + list(orders)
        for zero, orders in ORDERS.items()
    ]
    texts = [strategy.to_json() for strategy in strategies]

    runs = run_on(2 * STAGES, train_all, "uneven", STAGES, ROWS, texts)

    for of_level in zip(*runs, strict=True):
        assert_same(of_level, plain("uneven", STAGES, ROWS, 2 * MICROBATCHES))
