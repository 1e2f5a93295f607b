"""Who made a node or a temporal edge: capture, a directive of the strategy, or a pass."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Maker:
    """
    >>> print(Maker("order", 7, 12)), print(Maker("transfers"))
    order (directive 7 of 12)
    transfers
    (None, None)
    """

    name: str  # of the directive or pass, or the reason for a temporal edge
    directive: int = 0  # position in the strategy, from 1; 0 if it is not a directive
    of: int = 0  # number of directives in the strategy

    @property
    def is_order(self) -> bool:
        """Whether the user asked for it with an `Order`."""
        return self.name == ORDER

    def __str__(self) -> str:
        return f"{self.name} (directive {self.directive} of {self.of})" if self.of else self.name


ORDER = "order"  # the name of the directive
PASS_MADE, CAPTURED = Maker("pass"), Maker("capture")
