"""View data for tests: compiled strategies of models without torch, with predicted times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from browser import Browser
from synthetic import chain, moe_chain

from piper.costs import Costs
from piper.directives import Stream
from piper.ir.model import Model
from piper.job.compile.compiler import Compiled, compile_strategy
from piper.plan.analyse.trace import MEASURED, Span, Trace
from piper.strategies import BUILDERS
from piper.view.page import page
from piper.view.view_data import DeviceView, ViewData, view_data

SLOW = Costs(link=100.0, latency=0.2, streams={"ep": 60.0})  # messages that can be seen


def compiled(name: str, model: Model, **options: int) -> Compiled:
    return compile_strategy(model, BUILDERS[name](**options), costs=SLOW)


def built(name: str, model: Model, **options: int) -> ViewData:
    made = compiled(name, model, **options)
    return view_data(name, made.dag, made.plans)


def pipeline(name: str = "1f1b", microbatches: int = 3) -> ViewData:
    return built(name, chain(2), pp=2, microbatches=microbatches)


def experts() -> ViewData:
    return built("dualpipev", moe_chain(4), pp=2, dp=2, ep=2, zero=2, microbatches=4)


def divided() -> ViewData:
    """Experts, and a GPU divided between them and compute."""
    strategy = BUILDERS["dualpipev"](pp=2, dp=2, ep=2, zero=2, microbatches=4)
    strategy += [Stream("ep", sms=20, priority="high"), Stream("compute", sms=112)]
    made = compile_strategy(moe_chain(4), strategy, costs=SLOW)
    return view_data("divided", made.dag, made.plans)


def measured(found: ViewData, factor: float = 2.0) -> ViewData:
    """The traces of a run in which everything took longer."""
    before = found.traces[0]
    spans = {
        device: tuple(
            Span(s.at, 5 + factor * s.issued, 5 + factor * s.start, 5 + factor * s.end) for s in row
        )
        for device, row in before.spans.items()
    }
    return found.with_traces([Trace("seen", MEASURED, spans, step=7)])


def crowd(devices: int = 16, bars: int = 3200) -> ViewData:
    """Very many bars: each device computes, and every third piece of work sends something."""
    kinds = ["F", "BI", "send", "BW"]
    rows: dict[str, list[Any]] = {
        "kind": [kinds[k % 4] for k in range(bars)],
        "stream": ["pp" if k % 4 == 2 else "compute" for k in range(bars)],
        "node": [-1] * bars,
        "text": [f"run     work {k}" for k in range(bars)],
        "waits": [[k - 1] if k else [] for k in range(bars)],
    }
    memory = {"at": list(range(bars)), "activations": [100 + k % 50 for k in range(bars)]}
    peak = {"total": 149, "at": 49, "held": {"activations": 149}, "largest": []}
    views = [DeviceView(d, rows, memory, {"parameters": 40}, peak) for d in range(devices)]
    spans = tuple(Span(k, 1e-3 * k, 1e-3 * k, 1e-3 * k + 9e-4) for k in range(bars))
    trace = Trace("crowd", MEASURED, dict.fromkeys(range(devices), spans))
    empty = {
        name: []
        for name in (
            "id", "kind", "region", "phase", "tags", "maker", "source", "bytes", "flops",
            "expected", "data",
        )
    }  # fmt: skip
    orders: dict[str, list[Any]] = {"before": [], "after": [], "maker": []}
    return ViewData("crowd", empty, orders, tuple(views), (trace,))


def opened(browser: Browser, folder: Path, *runs: ViewData, **how: Any) -> Browser:
    path = folder / "page.html"
    path.write_text(page(runs))
    browser.open(path, **how)
    return browser
