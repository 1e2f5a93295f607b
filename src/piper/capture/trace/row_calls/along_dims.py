"""Along which dimensions of its first tensor a call works."""

from __future__ import annotations

from collections.abc import Sequence

from piper.capture.trace.row_calls.recorded_calls import RecordedCall

FIRST = frozenset({"flipud", "msort"})
SEVERAL = frozenset({  # those that are given, or else all
    "flip", "fft_fftshift", "fft_ifftshift", "fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn",
    "fft_ihfftn", "fft_hfftn", "gradient",
})  # fmt: skip
TWO = frozenset({"fft_fft2", "fft_ifft2", "fft_rfft2", "fft_irfft2"})  # or else the last two
NORMS = frozenset({"layer_norm", "rms_norm"})  # along the last ones, of so many sizes


def worked_along(call: RecordedCall, rank: int) -> set[int]:
    """Counted from the last one, which is -1."""
    numbers = [n for n in call.numbers if isinstance(n, int)]
    every, name = set(range(-rank, 0)), call.name
    if name in FIRST:
        return {-rank}
    if name == "fliplr":
        return {1 - rank}
    if name in NORMS:
        return set(range(-len(numbers), 0))
    if name == "rot90":
        return from_last(numbers[1:3] or (0, 1), rank)
    if name == "roll":  # by so much, and then along which
        return from_last(numbers[len(numbers) // 2 :], rank) if len(numbers) > 1 else every
    if name == "renorm":  # of what is left, for each element of one
        return every - from_last(numbers[1:2], rank)
    if name in SEVERAL or name in TWO:
        given = [n for n in numbers if -rank <= n < rank]
        return from_last(given, rank) if given else {-2, -1} if name in TWO else every
    first = (numbers[1:] if name == "topk" else numbers)[:1]
    return from_last(first, rank) if first and -rank <= first[0] < rank else {-1}


def from_last(dims: Sequence[int], rank: int) -> set[int]:
    return {dim % rank - rank for dim in dims}
