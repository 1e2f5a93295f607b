"""Numbers with their units, as text."""

from __future__ import annotations

NOTHING = 1e-6  # less than anybody can measure


def percent(fraction: float) -> str:
    """
    >>> percent(0.1234), percent(0.004), percent(0.0001), percent(0.0)
    ('12 %', '0.4 %', '<0.1 %', '0 %')
    """
    if NOTHING < fraction < 0.0005:
        return "<0.1 %"
    return f"{100 * fraction:.{1 if NOTHING < fraction < 0.01 else 0}f} %"


def time_text(seconds: float) -> str:
    """
    >>> time_text(12.3), time_text(0.0123), time_text(4e-6), time_text(0.0)
    ('12.30 s', '12.3 ms', '4 us', '0')
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{1e3 * seconds:.1f} ms"
    return f"{1e6 * seconds:.0f} us" if seconds else "0"
