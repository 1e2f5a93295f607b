"""What dividing a region does not support, and what to write instead."""

from difflib import get_close_matches

from piper.capture.refusals import refusal
from piper.errors import CaptureError


def updated_in_division(name: str) -> CaptureError:
    return refusal(
        "model",
        f"the forward pass changes the buffer {name} inside a divided region",
        "use GroupNorm or LayerNorm in place of a batch norm; or annotate what changes buffers as "
        "a region of its own, and divide the others: in place of tp= or cp= of a builder, write "
        "Place(where(), devices) and Shard(where(BODY=0), devices) with the tag of those",
    )


def seed_without_parameter(name: str, known: list[str]) -> CaptureError:
    near = get_close_matches(name, known, n=3, cutoff=0.5) or known[:3]
    return refusal(
        "plan", f"no divided parameter is called {name}", f"use one of {', '.join(near)}"
    )


def seed_that_does_not_divide(
    name: str, dim: int, shape: tuple[int, ...], ways: int
) -> CaptureError:
    what = f"{name} has the shape {list(shape)}"
    there = f"{shape[dim]} rows or columns" if dim < len(shape) else "a dimension less"
    return refusal(
        "plan",
        f"{what} and cannot be cut along dimension {dim}: {there} for {ways} devices",
        "cut it along another dimension in `plan`, leave it to Piper, or use other devices",
    )


def seed_not_possible(name: str, dim: int, where: str) -> CaptureError:
    return refusal(
        where,
        f"{name} cannot be cut along dimension {dim}: nothing that reads it can be divided so",
        "cut it along another dimension in `plan`, or leave it to Piper",
    )


def no_ring(where: str, attention: str, reason: str) -> CaptureError:
    return refusal(
        where,
        f'attention="{attention}" is not possible for any attention of the model: {reason}',
        "leave out attention= (cp_attention= of a schedule), and Piper finds another way; or call "
        "torch.nn.functional.scaled_dot_product_attention on tokens that divide evenly",
    )


def unknown_size_in_division(where: str) -> CaptureError:
    return refusal(
        where,
        "a size depends on data inside a divided region",
        "keep all tokens, and leave those that do not count out of the loss (ignore_index of "
        "cross_entropy, or a mask that multiplies), instead of selecting some as `x[mask]` does; "
        "or leave that region out of the Shard of weights or tokens",
    )


def values_in_division(where: str) -> CaptureError:
    return refusal(
        where,
        "an operator looks at values, so it cannot be divided",
        "leave its region out of the Shard of weights or tokens",
    )


def memory_of_others(where: str) -> CaptureError:
    return refusal(
        where,
        "as_strided reads memory outside of its tensor, or between its elements, in a divided "
        "region",
        "write it with slices, unfold or reshape, or call contiguous() before it; or leave that "
        "region out of the Shard of weights or tokens",
    )


def uneven_rows(where: str, rows: int, ways: int) -> CaptureError:
    return refusal(
        where,
        f"the {rows} rows of a region of experts cannot be divided evenly over {ways} devices",
        f"use microbatches with a number of tokens that {ways} divides",
    )


def experts_beside_whole_regions(where: str) -> CaptureError:
    return refusal(
        where,
        "experts are in a stage of which some regions are divided, and their neighbours are not",
        "let the Shard of weights or tokens match the regions before and behind the experts, too",
    )
