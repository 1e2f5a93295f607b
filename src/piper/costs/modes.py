"""How regions are run. The same region takes another time in another mode."""

from __future__ import annotations

from enum import StrEnum


class Mode(StrEnum):
    """What `Trainer(compiled=..., graphs=...)` asks for."""

    EAGER = "eager"  # PyTorch's own operators, one after the other
    COMPILED = "compiled"  # by Inductor
    GRAPHS = "graphs"  # eager operators in CUDA graphs
    COMPILED_GRAPHS = "compiled graphs"

    @property
    def is_compiled(self) -> bool:
        return self in (Mode.COMPILED, Mode.COMPILED_GRAPHS)

    @property
    def has_graphs(self) -> bool:
        return self in (Mode.GRAPHS, Mode.COMPILED_GRAPHS)

    @property
    def without_graphs(self) -> Mode:
        """How regions are run while they are measured.

        >>> Mode.COMPILED_GRAPHS.without_graphs
        <Mode.COMPILED: 'compiled'>
        """
        return {Mode.GRAPHS: Mode.EAGER, Mode.COMPILED_GRAPHS: Mode.COMPILED}.get(self, self)


def mode_of(compiled: bool, graphs: bool | str = False) -> Mode:
    """With graphs="auto", it is not known yet whether there are any.

    >>> mode_of(compiled=True, graphs=False)
    <Mode.COMPILED: 'compiled'>
    """
    if graphs is True:
        return Mode.COMPILED_GRAPHS if compiled else Mode.GRAPHS
    return Mode.COMPILED if compiled else Mode.EAGER
