"""What other systems have on their trainers, and what to write here."""

from __future__ import annotations

from inspect import isfunction
from typing import TYPE_CHECKING, Any

from piper.errors import InputError, NoAttribute, did_you_mean, nearest
from piper.job.arguments import OF_CALLS, names_options
from piper.job.first_lines import trained_parameters
from piper.job.job import Job
from piper.names import amount

STEP = "leave it out: trainer.step includes zero_grad, the backward and the optimizer's step"
SCHEDULE = "leave it out: trainer.step includes it, after the optimizer; metrics.lr is the rate"
LOOP = "write `for batch in loader: trainer.step(batch)`, which is in training mode"
WEIGHTS = (
    "trainer.state_dict() has the trained weights on device 0, for model.load_state_dict; "
    "trainer.export(folder) writes them, and save_pretrained after piper.from_pretrained"
)
WAITS = "leave it out: the processes wait for each other in every step, evaluation and save"
MEANS = "leave it out: losses, and what trainer.evaluate returns, are those of all replicas"
RATE = "the metrics of a step have it: trainer.step(batch).lr"
LOG = 'write Trainer(log="tensorboard"), "wandb", "print" or a .csv file, or use what step returns'
PRETRAINED = "write trainer.export(folder); a Trainer by piper.from_pretrained has it"
OUTPUTS = "write trainer.predict(*inputs), the output of the model, and compute it from that"
RATES = ("lr", "learning_rate")
SET_RATE_BELOW = "for the learning rate, give Trainer(lr_scheduler=...)"
SET_RATE = "give Trainer(lr_scheduler=...), which sets it after every step"
FIXES = {
    "optimizer": f"{STEP}; {SET_RATE_BELOW}",
    "optimizers": f"{STEP}; {SET_RATE_BELOW}",
    "optim": f"{STEP}; {SET_RATE_BELOW}",
    "opt": f"{STEP}; {SET_RATE_BELOW}",
    "param_groups": SET_RATE_BELOW,
    "set_lr": SET_RATE_BELOW,
    "zero_grad": STEP,
    "backward": STEP,
    "optimizer_step": STEP,
    "lr_scheduler": SCHEDULE,
    "scheduler": SCHEDULE,
    "scaler": 'leave it out: with Trainer(precision="fp16"), trainer.step scales the loss',
    "clip_grad_norm": "write Trainer(max_norm=...); metrics.grad_norm is the norm before it",
    "clip_grad_norm_": "write Trainer(max_norm=...); metrics.grad_norm is the norm before it",
    "accumulate": "write microbatches=... in the strategy: one step is one optimizer step",
    "no_sync": "leave it out: gradients are reduced once, after all microbatches of a step",
    "train": LOOP,
    "fit": LOOP,
    "training_step": LOOP,
    "train_batch": "write trainer.step(batch)",
    "train_step": "write trainer.step(batch)",
    "train_on_batch": "write trainer.step(batch)",
    "training_batch": "write trainer.step(batch)",
    "eval_step": "write trainer.evaluate(batches)",
    "validation_step": "write trainer.evaluate(batches)",
    "sched": SCHEDULE,
    "num_replicas": "write trainer.replicas",
    "dp_rank": "write trainer.replica, the part of the data of this process",
    "dp_size": "write trainer.replicas",
    "get_rank": "write trainer.rank",
    "get_world_size": "write trainer.replicas, the number of parts of the data",
    "checkpoint": "write trainer.save(folder)",
    "restore": "write trainer.resume(folder)",
    "stop": "write trainer.request_stop(), which all processes see in trainer.stopping",
    "should_stop": "write trainer.stopping",
    "acc": OUTPUTS,
    "accuracy": OUTPUTS,
    "logits": OUTPUTS,
    "outputs": OUTPUTS,
    "eval": "leave it out: trainer.evaluate and trainer.predict are in eval mode",
    "validate": "write trainer.evaluate(batches)",
    "test": "write trainer.evaluate(batches)",
    "forward": "write trainer.step(batch), or trainer.predict(*inputs) for outputs in eval mode",
    "generate": "save the weights, and load them where you generate: docs/hugging_face.md",
    "model": WEIGHTS,
    "module": WEIGHTS,
    "unwrap_model": WEIGHTS,
    "get_state_dict": WEIGHTS,
    "parameters": WEIGHTS,
    "named_parameters": WEIGHTS,
    "load_state_dict": "write trainer.load(path of safetensors), or trainer.resume(folder)",
    "save_checkpoint": "write trainer.save(folder)",
    "save_state": "write trainer.save(folder)",
    "load_checkpoint": "write trainer.resume(folder)",
    "load_state": "write trainer.resume(folder)",
    "save_model": "write trainer.export(folder), or trainer.save(folder) for a checkpoint",
    "save_pretrained": PRETRAINED,
    "log": LOG,
    "log_dict": LOG,
    "log_metrics": LOG,
    "loss": "the metrics of a step have it: trainer.step(batch).loss",
    "metrics": "trainer.step(batch) returns them",
    "epoch": "keep it in your loop; trainer.steps is the number of steps",
    "current_epoch": "keep it in your loop; trainer.steps is the number of steps",
    "local_rank": "leave it out: Piper chooses the GPU; trainer.rank is the process",
    "lr": RATE,
    "learning_rate": RATE,
    "get_lr": RATE,
    "get_last_lr": RATE,
    "global_step": "write trainer.steps",
    "global_steps": "write trainer.steps",
    "global_rank": "write trainer.rank",
    "process_index": "write trainer.rank",
    "is_main_process": "write trainer.rank == 0",
    "is_global_zero": "write trainer.rank == 0",
    "world_size": "write trainer.replicas, the number of parts of the data",
    "num_processes": "write trainer.replicas, the number of parts of the data",
    "device": "leave it out: trainer.step moves the batch",
    "barrier": WAITS,
    "wait_for_everyone": WAITS,
    "gather_for_metrics": MEANS,
    "reduce": MEANS,
    "all_gather": MEANS,
    "is_local_main_process": "write trainer.rank == 0",
    "autocast": 'leave it out: write Trainer(precision="bf16")',
    "to": "leave it out: write Trainer(device=...), and precision= for a type",
    "cuda": "leave it out: Piper chooses the GPU, or write Trainer(device=...)",
    "print": "write `if trainer.rank == 0: print(...)`",
    "push_to_hub": "write trainer.export(folder), and upload the folder",
    "gradient_accumulation_steps": "write microbatches=... in the strategy",
    "accumulation_steps": "write microbatches=... in the strategy",
    "prepare": "leave it out: give the model to piper.Trainer, and each process its own batches",
}


class OtherAttributes:
    """A Trainer, if it is asked for what others have."""

    def __init_subclass__(cls) -> None:
        """Calls with options that there are not say which there are."""
        super().__init_subclass__()
        for name, one in list(vars(cls).items()):
            if isfunction(one) and name in OF_CALLS and not hasattr(one, "__wrapped__"):
                setattr(cls, name, names_options(one))

    def __repr__(self) -> str:
        programs = vars(self).get("_programs")  # None: it was not made completely
        return object.__repr__(self) if programs is None else trainer_text(self, programs.job)

    if not TYPE_CHECKING:  # a type checker would allow any name

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property failed: with its own error, again
                return object.__getattribute__(self, name)
            raise missing(self, name)

        def __setattr__(self, name: str, value: Any) -> None:
            if name in RATES:
                raise NoAttribute.of("trainer", f"it has no {name}, which may be set", SET_RATE)
            object.__setattr__(self, name, value)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise InputError.of("trainer", "it is not a function", FIXES["forward"])


def trainer_text(trainer: Any, job: Job) -> str:
    """What is trained, on what, and how far."""
    trained, known = trained_parameters(job.model)
    some = f", {trained:,} of them trained" if trained < known else ""
    directives = ", ".join(dict.fromkeys(type(one).__name__ for one in job.strategy))
    return (
        f"{type(trainer).__name__} of {type(job.model).__name__} ({known:,} parameters{some}): "
        f"{amount(len(job.strategy.devices), 'device')}, {amount(job.replicas, 'replica')}, "
        f"{amount(job.microbatches, 'microbatch', 'microbatches')}, "
        f"{amount(trainer.steps, 'step')} done; strategy of {directives}"
    )


def missing(trainer: Any, name: str) -> AttributeError:
    """
    >>> print(missing(None, "global_step"))
    trainer: it has no global_step
      fix: write trainer.steps
    """
    if name in FIXES:
        return NoAttribute.of("trainer", f"it has no {name}", FIXES[name])
    near = did_you_mean(nearest(name, dir(type(trainer))))
    return AttributeError(f"'Trainer' object has no attribute {name!r}{near}", name=name)
