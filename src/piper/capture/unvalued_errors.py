"""Errors of torch and Python about tensors and numbers that have no value in a trace."""

from types import TracebackType

from piper.capture import autograd_refusals, refusals
from piper.capture.refusals import refusal
from piper.capture.source_lines import called_files, is_nested, is_transformed, line_of
from piper.capture.torch_private import VALUE_WANTED, is_generator_error
from piper.errors import CaptureError

# What torch has in place of numbers, and what Dynamo says of them inside torch.cond.
NUMBERS = ("SymInt", "SymFloat", "SymBool", "SymNode", "data-dependent expression")
MEMORY = ("data pointer", "has no storage", "torch.storage.UntypedStorage")
OUTSIDE = "FunctionalTensor on its own"
THREADS = ("threading", "concurrent", "multiprocessing")


def explained(error: Exception) -> CaptureError | None:
    """What such an error means for the user's code. None: it is about something else."""
    at, text = line_of(error.__traceback__), str(error)
    if isinstance(error, VALUE_WANTED):
        return refusals.value_wanted(at)
    if is_generator_error(error):
        return refusals.own_generator(at)
    if is_transformed(error.__traceback__):
        return refusals.transformed(at)
    if OUTSIDE in text:
        threads = in_thread(error.__traceback__)
        return other_thread(at) if threads else autograd_refusals.tensor_subclass(at)
    if is_nested(error.__traceback__):
        return refusals.packed(at, "nested tensors")
    if any(part in text for part in MEMORY):
        return memory_wanted(at)
    return refusals.value_wanted(at) if is_about_numbers(error) else None


def is_about_numbers(error: Exception) -> bool:
    """Whether Python or torch cannot compute with a number that has no value.

    As a key, as JSON, in an exponent.
    """
    return any(name in str(error) for name in NUMBERS)


def in_thread(trace: TracebackType | None) -> bool:
    """Whether Python's own threads were on the way to an error."""
    return any(f"/{name}" in file for file in called_files(trace) for name in THREADS)


def other_thread(where: str) -> CaptureError:
    return refusal(
        where,
        "the forward computes in another thread, which a trace does not see",
        "compute one after the other: the devices of a strategy run at the same time, anyway",
    )


def memory_wanted(where: str) -> CaptureError:
    return refusal(
        where,
        "the forward reads the memory of a tensor (data_ptr, torch.save, pickle, DLPack), which "
        "has no values while Piper traces the model",
        "save tensors in your training loop; make kernels of your own operators, with "
        "torch.library.custom_op and register_autograd",
    )
