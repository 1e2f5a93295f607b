"""Plans survive the way through JSON."""

from synthetic import chain, moe_chain

from piper.directives import Place, Replicate, Shard, Split
from piper.ir.filters import where
from piper.job.compile.compiler import compile_strategy
from piper.plan.serialization import from_json, to_json
from piper.strategies import zb_h1


def test_a_plan_that_was_written_is_read_back_equal() -> None:
    places = [Place(where(PP=0), [0]), Place(where(PP=1), [1]), Place(where(PP=2), [0])]
    model = chain(3, skips=((0, 2),), tied=True)
    both, cut = [Place(where(), [0, 1]), Replicate(where(), [0, 1])], Shard(where(EP=0), [0, 1])
    plans = (
        *compile_strategy(moe_chain(1), [*both, cut]).plans,
        *compile_strategy(model, [*places, Split("MB", 3)], clip=True).plans,
        *compile_strategy(chain(2), [Place(where(), [0, 1]), Replicate(where(), [0, 1], 3)]).plans,
        *compile_strategy(chain(2), zb_h1(pp=2, microbatches=4).directives).plans,
    )

    texts = [to_json(plan) for plan in plans]

    assert tuple(map(from_json, texts)) == plans
    assert [to_json(from_json(text)) for text in texts] == texts
