"""Who made a node or asked for an order: capture, a directive of the strategy, or a pass."""

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

    name: str  # of the directive or pass; of an order, why it is there
    directive: int = 0  # its place in the strategy, from 1; 0: it is none
    of: int = 0  # so many directives

    @property
    def is_order(self) -> bool:
        """Whether the user asked for it with an `Order`."""
        return self.name == ORDER

    def __str__(self) -> str:
        return f"{self.name} (directive {self.directive} of {self.of})" if self.of else self.name


ORDER = "order"  # what the directive is called
PASS_MADE, CAPTURED = Maker("pass"), Maker("capture")
