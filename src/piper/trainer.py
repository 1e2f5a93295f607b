"""The Trainer: compiles a strategy for a model, and trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from piper.capture import Precision
from piper.costs import Costs
from piper.directives.strategy import Strategy
from piper.job.arguments import given_strategy, names_options
from piper.job.batch.batch import Batch
from piper.job.batch.shaped_batches import as_in_first
from piper.job.inspecting import is_inspecting
from piper.job.inspection import inspected
from piper.job.job import BatchKind, Job
from piper.job.loop.around_step import ModelWrites, refuse_modes
from piper.job.loop.closing import Closing
from piper.job.loop.metric_log import Log, log_makers, metric_log
from piper.job.loop.on_nan import OnNan, after_step
from piper.job.loop.stale_model import StaleModel
from piper.job.loop.tracing import from_environment, recording
from piper.job.loss.loss_reduction import refuse_weightless
from piper.job.model_flops import best_seconds
from piper.job.options import ADAMW, GraphsOption, Loss, Options
from piper.job.other_attributes import OtherAttributes
from piper.job.processes import consistency
from piper.job.processes.different_lengths import Lengths
from piper.job.processes.stopping import StopRequest
from piper.job.processes.stragglers import Stragglers
from piper.job.programs.averaging import Averaging
from piper.job.programs.evaluation import Evaluation, evaluated, predicted
from piper.job.programs.forward_programs import ForwardPrograms
from piper.job.programs.gathering import gathered
from piper.job.programs.programs import Programs, whole_state
from piper.job.programs.retarget import retargeted
from piper.job.programs.step_programs import agreed_step, prepared, refuse_lengths
from piper.job.programs.tuning import measured_costs
from piper.runtime.batch import StepInputs
from piper.runtime.checkpoint.checkpoints import Checkpoints, path_of
from piper.runtime.checkpoint.description import described
from piper.runtime.checkpoint.folder import Keep
from piper.runtime.checkpoint.model_names import Names
from piper.runtime.checkpoint.save import Run
from piper.runtime.checkpoint.weights import Rename
from piper.runtime.execute import Program
from piper.runtime.metrics import Metrics
from piper.runtime.optimizers.known_optimizers import MakeOptimizer, MakeScheduler
from piper.runtime.own_state_dict import exported_tensors, loaded_tensors
from piper.runtime.processes.world import join, processes, world
from piper.runtime.state import replica_digests
from piper.runtime.state.averages import advance
from piper.runtime.state.initial_values import Init
from piper.runtime.steps_in_flight import steps_on


class Trainer(Closing, OtherAttributes):
    """Trains a model under a strategy. The same script runs on every device.

    `example` is one whole batch of a replica, as `step` gets it. Every process gives the batch of
    its replica (`trainer.replica` of `trainer.replicas`). Batches may be tuples, lists, dicts or
    keyword arguments. The loss is `loss_fn(model(*batch[:-1]), batch[-1])`. If `loss_fn` is None,
    it is `model(*batch)`, or its `.loss`. docs/trainer.md has more.

    - `optimizer`: makes one from named parameters; `lr_scheduler`: makes one from an optimizer
    - `no_decay`: parts of names of parameters without weight decay
    - `reduction`, `loss_weight`: how losses of microbatches add up, where their graph hides it
    - `max_norm`: of gradients on all devices, to clip them; `ema`: decay of averages (`averaged`)
    - `on_nan`: "stop", "skip" or "report" if a loss or norm is not finite
    - `precision`: "bf16", "fp16" or a `Precision`
    - `compiled`, `graphs`: regions run through Inductor, as CUDA graphs ("auto": if that is faster)
    - `seed`: of dropout; `init(name, tensor)`, or else `seed`, fills a model on `meta`
    - `costs`: what `tune` returned, a file of it, or the name of a data sheet ("h200")
    - `memory_gib`: memory of a device; a strategy that needs more is an error
    - `device`: "cuda" or "cpu"; by default a GPU if there is one
    - `log`: where metrics go: "print", "tensorboard", "wandb", a .csv file, or your function
    - `whole`: inputs that are not cut; `max_programs`: programs kept for shapes of batches
    - `timeout`: seconds to wait for another process
    """

    _broken = False  # whether a step failed
    _lengths: Lengths | None = None  # of the batches of all replicas in this step, if they differ
    steps = 0  # done so far, including those before `resume`

    @names_options
    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Loss | None,
        strategy: Strategy | Sequence[Any] | Callable[[int], Any] | None = None,
        *,
        example: Any,
        optimizer: MakeOptimizer = ADAMW,
        lr_scheduler: MakeScheduler | None = None, no_decay: Sequence[str] = (),
        reduction: Literal["mean", "sum"] | None = None,
        loss_weight: Callable[..., Any] | None = None,
        max_norm: float | None = None, ema: float | None = None, on_nan: OnNan | None = None,
        precision: Precision | str | None = None,
        compiled: bool = False, graphs: GraphsOption = "auto",
        seed: int = 0, init: Init | None = None,
        costs: Costs | str | Path | None = None, memory_gib: float | None = None,
        device: str | torch.device | None = None, log: Log = None,
        max_programs: int = 64, whole: Sequence[str] | None = None, timeout: float = 600.0,
    ) -> None:  # fmt: skip
        options = Options(
            optimizer=optimizer, lr_scheduler=lr_scheduler, no_decay=no_decay, reduction=reduction,
            loss_weight=loss_weight, max_norm=max_norm, ema=ema, on_nan=on_nan, precision=precision,
            compiled=compiled, graphs=graphs, seed=seed, init=init, costs=costs,
            memory_gib=memory_gib, device=device, max_programs=max_programs, whole=whole,
        )  # fmt: skip
        StaleModel.end_marks()
        job = Job(model, loss_fn, given_strategy(strategy, processes()), options)
        first, logs = job.example(example), log_makers(log)
        if is_inspecting():
            raise inspected(job, first)
        self.rank, self._example = join(timeout, job.device.type == "cuda"), as_in_first(first)
        self._programs = Programs(job, self.rank, len(first.arguments))
        self._forwards = ForwardPrograms(self._programs)
        self._in_flight, self._recording = steps_on(job.device), from_environment()
        self._checkpoints, self._stop, self._averaging = Checkpoints(), StopRequest(), Averaging()
        self._stepped: set[BatchKind] = set()  # kinds of batches seen so far
        self._best: dict[BatchKind, float | None] = {}  # seconds of a step at the peak
        self._programs.get(first, job.kind(self._example, 0), self.steps)
        taken = consistency.digests(model)  # of the values that were copied
        self._writes, self._stale = ModelWrites(model, taken), StaleModel(model, taken, loss_fn)
        self._slow, self._log = Stragglers(self.rank, job.device), metric_log(logs, self.rank)
        self._close_at_exit(self._log)

    @property
    def _job(self) -> Job:
        return self._programs.job

    @property
    def strategy(self) -> Strategy:
        """The strategy that was compiled."""
        return self._job.strategy

    @property
    def replica(self) -> int:
        """The part of the data that this process must load."""
        return self._job.feeds.feed(self.rank)

    @property
    def replicas(self) -> int:
        """The number of parts of the data.

        Replicas that share devices (as in DualPipe) share a batch: they count as one here.
        """
        return self._job.replicas

    def step(self, *batch: Any, **named: Any) -> Metrics:
        """One optimizer step on one batch."""
        self._refuse_closed("step")
        given, kind = self._batch_of(batch, named)
        self._in_flight.begin()
        program, inputs, kind = self._ready(given, kind)
        on_nan, known = self._job.options.on_nan, self._job.whole_inputs
        try:
            with self._slow.stepping(program):
                recorded = self._recording.step(self.steps + 1, program, inputs)
                counts = after_step(on_nan, program, inputs, self.steps + 1, known, given)
                lr = self._programs.state.learning_rate
                if counts:
                    advance(self._programs.state)
        except BaseException:
            self._in_flight.forget()
            self._broken = world() > 1
            raise
        self.steps, self._writes.stepped = self.steps + 1, self._writes.stepped + 1
        replica_digests.refuse_drift(self._programs.state, self.steps, replica_digests.EVERY)
        if kind not in self._best:
            self._best[kind] = best_seconds(self._job, given, self.replica)
        lengths, read = self._lengths, self._in_flight.end(program)
        sizes = lengths.sizes if lengths else self._job.rows.sizes(given, self.replica)
        peak = None if lengths else self._best[kind]
        metrics = Metrics(self.steps, *sizes, read, lr, peak, self._slow.found)
        self._log.add(metrics, over=self._in_flight.over)
        self._recording.keep(self.steps, recorded, self._programs.made.get(kind))
        self._stop.leave(self)
        self._stale.after_step()
        return metrics

    def request_stop(self) -> None:
        """Ask all processes to stop after a step. Any of them may ask, also in a signal handler."""
        self._stop.want()

    @property
    def stopping(self) -> bool:
        """Whether a process asked to stop: after a step, the same in all of them. Save, and end."""
        return self._stop.agreed

    def record(self, path: str | Path, steps: int = 3, profile: bool = False) -> None:
        """Record the next steps in a file for `piper view` and Perfetto. Every process calls it.

        Device 0 writes the file after the last of them, or in `close`. With `profile`, every device
        writes what torch's profiler sees of its instructions beside it.
        """
        self._enter("record")
        self._recording.finish()
        self._recording = recording(path_of(path), self.steps + 1, steps, profile)

    def tune(self, *batch: Any, rounds: int = 2, **named: Any) -> Costs:
        """Measure all costs, and schedule overlapping work by them from now on.

        Every process must call it. Parameters and optimizers do not change. Write `costs.to_json()`
        to a file, and `Trainer(costs=...)` reads it next time.
        """
        self._enter("tune")
        given, kind = self._batch_of(batch, named)
        program, inputs, kind = self._ready(given, kind)
        refuse_lengths("tune", self._lengths)
        costs = measured_costs(self._programs, program, inputs, kind, rounds)
        self._programs.get(self._job.rows.as_first(given, self.replica), kind, self.steps)
        return costs

    @names_options
    def evaluate(self, batches: Iterable[Any]) -> Evaluation:
        """The loss of these batches, in eval mode and without gradients, under the strategy.

        A batch has the form of `example`; every process gives those of its replica, equally many.
        """
        self._enter("evaluate")
        return evaluated(self._forwards, self._example, batches, self._in_flight.moved)

    def predict(self, *batch: Any, **named: Any) -> Any:
        """The output of the model in eval mode, for the inputs of all replicas, on device 0.

        Every process gives the inputs of its replica, without labels. The others get None.
        """
        self._enter("predict")
        return predicted(self._forwards, self._example, batch, named, self._in_flight.moved)

    def gather(self, mine: Any) -> list[Any] | None:
        """What every replica has, such as labels, in the order of `predict`'s rows, on device 0.

        Every process calls it. The others get None. Tensors are on the CPU.
        """
        self._enter("gather")
        return gathered(mine, self.rank, self._job)

    def averaged(self) -> AbstractContextManager[None]:
        """A `with` in which `evaluate`, `predict`, `state_dict`, `export` use the averages.

        So does `save_pretrained`. They are those of `Trainer(ema=...)`. Every process enters it.
        """
        self._enter("averaged")
        self._in_flight.finish()
        return self._averaging.swapped(self._programs, self._checkpoints.peers)

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """The parameters and buffers on device 0, for `load_state_dict`. Every process calls it."""
        consistency.agree_on_call("state_dict", self.replicas)
        found = whole_state(self._programs)
        self._writes.allow_values(found, self._job.model)
        return found

    def save(
        self, folder: str | Path, *, wait: bool = True, keep: int = 1,
        keep_every: int | None = None, loader: Any = None,
    ) -> None:  # fmt: skip
        """Write a checkpoint for `resume`. Every process calls it.

        An older checkpoint in the folder stays until this one is complete. All processes must see
        the same folder. With `wait=False`, it is written during the next steps. The newest `keep`
        checkpoints stay, and those after every `keep_every` steps. `loader` knows its position in
        the data: anything with `state_dict` and `load_state_dict`.
        """
        self._enter("save")
        replica_digests.refuse_drift(self._programs.state, self.steps)
        programs, job, keeping = self._programs, self._job, Keep(keep, keep_every)
        given = programs.state, programs.turns, keeping, loader, wait, job.model, job.initial
        self._checkpoints.save(folder, self._run, *given)

    def resume(self, folder: str | Path, missing_ok: bool = False, *, loader: Any = None) -> int:
        """Continue from what `save` wrote, under any strategy. Returns the steps done so far.

        Every process calls it, before the first step. `missing_ok`: start anew if there is nothing.
        `loader` continues where the one that was saved had stopped.
        """
        self._enter("resume")
        given = self._run, self._programs.state, missing_ok, loader, self._job.model
        self.steps = self._checkpoints.resume(folder, *given)
        self._log.resume(self.steps)
        return self.steps

    def load(
        self, path: str | Path, *, rename: Rename | None = None, strict: bool = True,
        only: Names | None = None,
    ) -> None:  # fmt: skip
        """Load weights before the first step, under any strategy. Every process calls it.

        `path` is a safetensors file, a folder of them as Hugging Face's, or what `save` wrote.
        `rename` maps names of the model to those in the files. `only` chooses tensors by name; if
        not `strict`, some may be missing or unknown.
        """
        self._enter("load")
        tensors = loaded_tensors(self._job.model, only), self._job.model
        self._checkpoints.load(path, self._run, self._programs.state, *tensors, rename, strict)

    def export(
        self, folder: str | Path, max_file_gib: float = 5.0, *, rename: Rename | None = None,
        only: Names | None = None, file: str = "model",
    ) -> None:  # fmt: skip
        """Write the weights as Hugging Face does: safetensors, with the names of the model.

        Every process calls it, and writes what it holds, in place of older files. All see the same
        folder. `only` chooses tensors by name; `rename` names them in the file, called `file`.
        """
        self._enter("export")
        tensors, state = exported_tensors(self._job.model, only), self._programs.state
        given = state, self._programs.turns, tensors, self._job.initial
        self._checkpoints.export(folder, *given, max_file_gib, rename or str, file)

    def retarget(self, strategy: Strategy | Sequence[Any]) -> int:
        """Go on with another strategy. Returns how many bytes moved between devices.

        Every process calls it, between steps. Parameters and optimizer states move in memory; the
        following losses are the same. Load the data by the new `replica` and `replicas`.
        """
        self._enter("retarget")
        self._in_flight.finish()
        self._recording.finish()
        given = self._checkpoints.peers, self._programs, given_strategy(strategy), self._example
        self._programs, example, sent = retargeted(*given, self.steps)
        self._example = example.map(lambda tensor: tensor.to("meta"))
        self._forwards, self._stepped = ForwardPrograms(self._programs), set()
        self._slow = Stragglers(self.rank, self._job.device)
        return sent

    @property
    def _run(self) -> Run:
        return Run(self.steps, described(self._job.model), self.replica, self.replicas)

    def close(self) -> None:
        """Release the communicators, as the end of a `with` does. Another Trainer may follow."""
        ends = self._recording.finish, self._in_flight.finish, self._log.close, self._stale.close
        for end in ends:
            end()
        try:
            self._checkpoints.close()
        finally:
            self._programs.close()

    def _enter(self, call: str) -> None:
        """Begin a call that all processes must make together. A step has its own check."""
        self._refuse_closed(call)
        consistency.agree_on_call(call, self.replicas)
        self._log.flush()
        self._programs.settle()

    def _refuse_closed(self, call: str) -> None:
        self._averaging.refuse(call)
        consistency.refuse_over(self._programs.comm is None, self._broken)
        StaleModel.end_marks()

    def _batch_of(self, batch: tuple[Any, ...], named: dict[str, Any]) -> tuple[Batch, BatchKind]:
        """The batch as a typed value, and its kind."""
        refuse_modes()
        self._programs.state.kept.refuse()
        given = self._job.batch(self._example, batch, named)
        return given, self._job.kind(given, self.replica)

    def _ready(self, batch: Batch, kind: BatchKind) -> tuple[Program, StepInputs, BatchKind]:
        """The program for a batch, its inputs, and the kind that all processes agree on."""
        programs, weights, step = self._programs, self._job.weights, self.steps
        known = programs.known_reduction(kind)
        own = [0.0] if known is None else weights(known, batch)
        weight, kind = self._agreed(batch, kind, sum(own))
        if prepared(programs, batch, self.replica, kind, self._lengths, step) or known is None:
            batch = self._job.whole_inputs.marked(batch)
            own = weights(programs.reduction(kind), batch)  # what it divides by is known now
            weight, kind = self._agreed(batch, kind, sum(own))
        refuse_weightless(weight)
        self._stepped = {*(self._stepped & programs.ready.keys()), kind}
        shares = programs.reduction(kind).shares(own, weight)
        inputs = self._job.inputs(batch, shares, step, self.replica, self._in_flight.moved)
        return programs.ready[kind], inputs, kind

    def _agreed(self, batch: Batch, kind: BatchKind, own: float) -> tuple[float, BatchKind]:
        """The total weight of all replicas, and the kind of this step in all processes."""
        shapes, flags, state = kind
        weight, failed = own * self.replicas, self._checkpoints.failed
        found = consistency.Agreed(weight, failed, state, self._stop.wanted)
        self._writes.refuse(self._job.model, self._job.captures.values())
        if not self._stepped:
            self._job.try_mean(batch)  # on real data: an example may be zeros
        if world() > 1:
            mine = replace(found, weight=own, own=self._slow.mine(self._programs.role))
            found = agreed_step(self._job, batch, kind, self.replica, mine, kind in self._stepped)
        self._lengths = found.lengths
        self._job.python_state.agreed = found.state
        self._checkpoints.refuse_failed(found.lost)
        self._stop.agreed = found.stop
        self._slow.see(found.devices)
        return found.weight, (shapes, flags, found.state)
