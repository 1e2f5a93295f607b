"""What capture does not support, and what to write instead."""

from typing import Any

import torch
from torch import Tensor, fx, nn

from piper.capture.fx_nodes import line
from piper.capture.source_lines import UNKNOWN, current_line
from piper.capture.torch_private import schema_text
from piper.capture.trace.arguments.inputs import name_of
from piper.errors import CaptureError
from piper.names import with_article


def refusal(where: str, what: str, fix: str) -> CaptureError:
    return CaptureError.of(where or UNKNOWN, what, fix)


def value_wanted(where: str) -> CaptureError:
    return refusal(
        where,
        "Python code needs the value of a tensor, which differs from batch to batch",
        "keep the decision in tensors (torch.where, masking, indexing), or pass the value "
        "as a Python number in `example`, where it becomes a constant",
    )


def guessed_size(where: str) -> CaptureError:
    return refusal(
        where,
        "a tensor whose size comes from a value (`x[:, :n]` with n from .item()) meets one of a "
        "fixed size, and only the value tells whether they fit",
        "choose single elements by a tensor, `x[:, n]` or index_select; keep all elements, and "
        "mask them with torch.where",
    )


def transformed(where: str) -> CaptureError:
    return refusal(
        where,
        "torch.vmap and other transforms of torch.func are not supported: a trace misses them",
        "write it with operators of torch that take whole batches (torch.bmm, torch.einsum, "
        "broadcasting); or make it an operator with torch.library.custom_op and "
        "register_autograd",
    )


TOTAL = "sum(losses.values())"


def not_a_loss(result: Any, given: bool) -> CaptureError:
    if isinstance(result, int | float | torch.SymFloat | torch.SymInt):
        fix = "return the tensor itself: leave out .item() or float(...)"
        what = "it returns a number of Python, which has no gradient"
        return refusal("loss_fn" if given else "model", what, fix)
    found = (
        f"a tensor {list(result.shape)} of {name_of(result.dtype)}"
        if isinstance(result, Tensor)
        else f"{with_article(type(result).__name__)}"
    )
    total = 'losses["loss"]' if isinstance(result, dict) and "loss" in result else TOTAL
    summed = f"; of a dict of losses, {total}" if isinstance(result, dict) else ""
    several = ', or {"loss": loss, "logits": logits}' if isinstance(result, tuple | list) else ""
    return refusal(
        "loss_fn" if given else "model",
        f"it returns {found}, not a scalar loss",
        "return one floating-point number, such as a mean over the microbatch" + summed
        if given
        else f"return the loss{several}, or an output with .loss (a model of transformers needs "
        "a batch that is a dict with labels); or pass "
        "loss_fn(output, labels) -> loss" + summed,
    )


def loss_without_parameters(where: str) -> CaptureError:
    return refusal(
        where,
        "the loss depends on no parameter that requires a gradient",
        "check for detach(), no_grad() and requires_grad_(False) before the loss",
    )


def cannot_copy(model: nn.Module, error: Exception, where: str) -> CaptureError:
    return refusal(
        type(model).__name__,
        f"{where or 'the model'} cannot be copied: {error}",
        "keep what cannot be copied (locks, streams, files, queues, generators, process groups) in "
        "a global, and not in attributes of modules; a class with its own `__getattr__` must raise "
        "AttributeError for names that it does not have",
    )


def updated_parameters(names: list[str]) -> CaptureError:
    return refusal(
        "model",
        f"the forward pass changes the parameters {', '.join(names)}",
        "make them buffers: `module.register_buffer(name, module._parameters.pop(name).detach())`",
    )


def cannot_be_sent(what: str, where: str = "") -> CaptureError:
    return refusal(
        where,
        f"{what} has no name by which another process can find it",
        "make it an operator with torch.library.custom_op, in a module that every process imports",
    )


def damaged_graph(why: str) -> CaptureError:
    return refusal(
        "",
        f"a graph that came as text is damaged ({why})",
        "use the same versions of Piper and torch in every process",
    )


def random_operation(node: fx.Node) -> CaptureError:
    name = str(node.target).removeprefix("aten.").split(".")[0]
    inside = " dropout" in schema_text(node)
    return refusal(
        line(node),
        f"{name} draws random numbers, which would depend on the strategy",
        "set its dropout to 0, and apply torch.nn.functional.dropout to what it returns"
        if inside
        else "draw them outside of the model and pass them as an argument, or use torch.rand, "
        "randn, randint, bernoulli, multinomial or dropout",
    )


def own_generator(where: str) -> CaptureError:
    return refusal(
        where,
        "a random operation has a generator of its own, whose state a captured step does not have",
        "leave out generator=: Piper draws from its seed, the step and the position in the batch",
    )


_WITHOUT_DECISION = (
    "set the probability to 0 (Hugging Face models: config.layerdrop = 0.0, or encoder_layerdrop "
    "and decoder_layerdrop), or scale what a layer adds by torch.bernoulli(...) or dropout"
)


def entangled_decision(where: str) -> CaptureError:
    return refusal(
        where,
        "Python decides by a random number what to run, and this changes more than the values that "
        "later code reads: other operations, other numbers, or other decisions",
        "let the decision choose between tensors of one shape; or " + _WITHOUT_DECISION,
    )


def ways_of_different_shape(where: str) -> CaptureError:
    return refusal(
        where,
        "Python decides by a random number what to run, and the two ways give values of different "
        "shapes or types",
        "let both ways give tensors of one shape and type; or " + _WITHOUT_DECISION,
    )


def decision_by_data(where: str) -> CaptureError:
    return refusal(
        where,
        "Python needs the value of a tensor that depends on the batch or on parameters",
        "keep the decision in tensors (torch.where, masking, indexing)",
    )


def drawn_value(where: str) -> CaptureError:
    return refusal(
        where,
        "Python computes with the value of a random number, which differs from step to step",
        "leave out .item(): compute with the tensor",
    )


def shared_update(name: str, writer: str, others: list[str]) -> CaptureError:
    return refusal(
        "model",
        f"the buffer {name} is updated in {writer} and also used in {', '.join(others)}",
        "use it in one region only, or register one buffer for each",
    )


def no_device(device: str) -> CaptureError:
    return refusal(
        "device",
        f"capture for {device} needs a {device} device, but there is none",
        'capture where the model will run, or for device="cpu"',
    )


def value_wanted_in_region(where: str) -> CaptureError:
    return refusal(
        where,
        "the region that begins here, or its derivative, needs a number that differs from "
        "batch to batch",
        "take sizes from tensors (x.shape[0]) instead of numbers (.item()), and decide with "
        "torch.where, also in the backward of your own operators",
    )


def no_kernel(where: str, operator: str) -> CaptureError:
    return refusal(
        where,
        f"the region that begins here needs {operator}, which torch cannot follow on tensors "
        "without values, at least not where a size depends on data",
        "keep all rows and weigh them by a mask, instead of selecting some (`x[mask]`), or use "
        "another function",
    )


def sparse_gradient(name: str) -> CaptureError:
    return refusal(
        "model", f"the gradient of {name} is sparse", "create the embedding with sparse=False"
    )


def scaled_by_frequency(where: str) -> CaptureError:
    return refusal(
        where,
        "the gradient of this embedding is divided by how often an index occurs in the batch, but "
        "a microbatch sees only its own rows",
        "create the embedding with scale_grad_by_freq=False",
    )


def hidden_update(where: str) -> CaptureError:
    return refusal(
        where,
        "an operation in the region that begins here changes a buffer, which a trace misses",
        "turn off its running statistics, or update the buffer in the module's own code",
    )


def packed(where: str, what: str = "packed sequences") -> CaptureError:
    return refusal(
        where,
        f"{what} are not supported: their sizes differ from batch to batch",
        "give the layer padded tensors, and mask what comes after the end of a sequence",
    )


def gradient_hook(where: str) -> CaptureError:
    return refusal(
        where,
        "it has a hook on gradients, which is not supported: backward graphs never call it",
        "remove the hook, and change gradients in the loss or in the optimizer",
    )


def checked_values(where: str) -> CaptureError:
    return refusal(
        where,
        "an operation in the region that begins here checks the values of its result while it runs",
        "use its variant without a check, such as torch.linalg.lu_factor_ex",
    )


def least_squares(where: str) -> CaptureError:
    return refusal(
        where,
        "torch.linalg.lstsq returns residuals whose size depends on values",
        "write the solution as torch.linalg.pinv(A) @ B",
    )


def own_backward() -> CaptureError:
    return refusal(
        current_line(),
        "the forward computes gradients itself (torch.autograd.grad or backward), which is not "
        "supported: Piper differentiates the model after it is traced",
        "write the derivative with operators of torch, or make it an operator with "
        "torch.library.custom_op and register_autograd",
    )


def lazy_parameter(name: str) -> CaptureError:
    return refusal(
        f"parameter {name}",
        "it is lazy: its shape is not known yet",
        "call the model once on a batch before you make the Trainer: model(*batch[:-1])",
    )


def compiled_module(name: str, by: str = "torch.compile") -> CaptureError:
    return refusal(
        f"module {name}" if name else "model",
        f"{by} has compiled it, and a trace cannot see inside",
        "give the Trainer the module itself, and compiled=True",
    )


def distributed_parameter(name: str) -> CaptureError:
    return refusal(
        f"parameter {name}",
        "it is a DTensor: another library has divided it over devices",
        "give the Trainer the model before it is parallelized, and divide it in the strategy, "
        'with Replicate(zero=3) or Shard(what="weights")',
    )


def sparse_tensor(where: str) -> CaptureError:
    return refusal(
        where,
        "sparse tensors are not supported: their sizes in memory differ from batch to batch",
        "multiply by a dense matrix, or use index_add or scatter_add with indices and values",
    )


def shared_memory(one: str, other: str) -> CaptureError:
    return refusal(
        f"parameter {other}",
        f"it shares memory with {one}, but is another tensor",
        f"tie them as one parameter: model.{other} = model.{one}",
    )


def drawn_number(where: str = "") -> CaptureError:
    return refusal(
        where,
        "its forward draws random numbers from Python or numpy, which a captured step would "
        "not repeat",
        "draw with torch.rand and keep the decision in tensors, or draw in the loader and pass the "
        "result with the batch; SpecAugment of Hugging Face models: "
        "config.apply_spec_augment = False",
    )


def changed_state(where: str, path: str, value: Any) -> CaptureError:
    """`path` is what changed: an attribute, or an item of what an attribute holds."""
    owner, item, _ = path.partition("[")
    name = owner.rpartition(".")[2]
    if callable(value) and not isinstance(value, Tensor):
        fix = "change it in your training loop: Piper reads it in each step"
    elif item or not isinstance(value, Tensor | int | float):
        fix = "keep it in a buffer, or change it in your training loop: Piper reads it in each step"
    elif isinstance(value, Tensor):
        fix = f'let it start with this shape: self.register_buffer("{name}", torch.zeros(...))'
    else:
        fix = f'make it a buffer: self.register_buffer("{name}", torch.tensor(...))'
    return refusal(
        where, f"the forward changes {owner}, which a captured step would not repeat", fix
    )


def changed_tensor(name: str) -> CaptureError:
    return refusal(
        "model",
        f"its forward changes {name} in another way than through self.{name}",
        f"change it as the registered buffer self.{name}; build the model again, since "
        "the trace has changed it",
    )


def foreign_write(where: str) -> CaptureError:
    return refusal(
        where,
        "the forward writes to a tensor that is not an argument or a buffer",
        "register it with register_buffer, in the model or in a loss that is a module",
    )


def changed_input(index: int, by_loss: bool = False) -> CaptureError:
    what = f"writes to tensor {index} of the batch"
    if by_loss:
        return refusal("loss", f"it {what}", "write to a copy: labels = labels.clone()")
    return refusal("model", f"its forward {what}", "write to a copy: x = x.clone()")


def mixed_rows(where: str) -> CaptureError:
    return refusal(
        where,
        "in this region the result of a row, or its gradient, depends on other rows, on how "
        "many there are, or on other experts, so it cannot be divided over devices",
        "compute each row only from itself and the parameters of its expert; move what needs "
        "several rows or counts (means, capacities, side losses) out of the region",
    )


def no_rows(where: str) -> CaptureError:
    return refusal(
        where,
        "this region of experts has an output without a row for each row that it reads",
        "return only rows, in the order in which the region reads them",
    )


def fixed_rows(where: str, error: str) -> CaptureError:
    return refusal(
        where,
        "this region of experts works only for one number of rows or experts: "
        + error.strip().splitlines()[0][:200],
        "write sizes that follow the tensors: -1 in view and reshape, torch.zeros_like, "
        "rows.shape[0], counts.shape[0]; use torch.repeat_interleave(counts) for the ids of "
        "experts; do not loop over the experts; or leave the region out of `Shard`",
    )
