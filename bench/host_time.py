"""Host time per instruction: plans of a real schedule run with kernels that do nothing.

python bench/host_time.py
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from common import save  # noqa: E402
from synthetic import chain  # noqa: E402

from piper.directives import Place, Split  # noqa: E402
from piper.ir.filters import where  # noqa: E402
from piper.job.compile.compiler import compile_strategy  # noqa: E402
from piper.plan.instructions import Run  # noqa: E402
from piper.runtime.batch import StepInputs
from piper.runtime.comm.gloo import ProcessComm  # noqa: E402
from piper.runtime.execute import Program  # noqa: E402
from piper.runtime.state.device_state import DeviceState  # noqa: E402

PARTS, STAGES, TURNS = 64, 8, 20


def loop_alone() -> tuple[Program, StepInputs]:
    """A program whose kernels do nothing."""
    compiled = compile_strategy(chain(STAGES), [Place(where(), (0,)), Split("MB", PARTS)])
    (plan,) = compiled.plans
    writes = {(i.region, i.phase): len(i.writes) for i in plan.instructions if isinstance(i, Run)}
    nothing = torch.zeros(2, 4)

    def kernels(region: str, phase: str):
        results = [(nothing,)] * writes[region, phase]
        return lambda *reads: results

    state = DeviceState()
    contents = {
        str(b): [(p.name, p.spec.shape, p.spec.dtype) for p in k.parameters]
        for b, k in compiled.dag.model.buckets.items()
    }
    state.add(plan.states, contents, lambda b: True, lambda n: torch.zeros(4, 4), torch.optim.SGD)
    batch = StepInputs((torch.zeros(PARTS, 2), torch.zeros(PARTS, 2)), (1 / PARTS,) * PARTS)
    return Program(plan, kernels, state, ProcessComm()), batch


def main() -> None:
    program, batch = loop_alone()
    program.acts = [
        act for act, one in zip(program.acts, program.plan.instructions, strict=True)
        if type(one).__name__ not in ("Add", "Total", "Update")
    ]  # those are tensor work, not the loop  # fmt: skip
    program.step(batch)
    started = time.perf_counter()
    for _ in range(TURNS):
        program.step(batch)
    each = 1e6 * (time.perf_counter() - started) / TURNS / len(program.acts)
    print(f"host time: {each:.2f} us per instruction ({len(program.acts)} instructions per step)")
    save("host_time", {"us_per_instruction": each, "instructions": len(program.acts)})


if __name__ == "__main__":
    main()
