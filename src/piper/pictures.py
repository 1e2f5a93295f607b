"""A strategy as a picture: what notebooks show for it."""

from __future__ import annotations

from html import escape

from piper.directives import Strategy
from piper.errors import StrategyError
from piper.names import amount
from piper.strategies.timing import strategy_rows
from piper.view import schedule_svg


def html(strategy: Strategy) -> str:
    """The schedule, if the strategy orders a pipeline, and its directives below it."""
    lines = f"<pre>{escape(str(strategy))}</pre>"
    picture = svg(strategy)
    if picture is None:
        return f"<div>{lines}</div>"
    count = f"<summary>{amount(len(strategy), 'directive')}</summary>"
    shown = f'<div style="overflow-x: auto">{picture}</div>'
    return f"<div>{shown}<details>{count}{lines}</details></div>"


def svg(strategy: Strategy) -> str | None:
    """One row per device, time across. None if there is no schedule to draw."""
    try:
        return schedule_svg.svg(strategy_rows(strategy))
    except StrategyError:
        return None
