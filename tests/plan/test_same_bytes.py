"""One input gives the same plans in every process: nothing depends on the order of a set."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes
TESTS = Path(__file__).parents[1]
PROGRAM = """
import sys
sys.path[:0] = sys.argv[1:]
from random import Random
from plan.expert_programs import random_experts
from plan.programs import random_program
from piper.job.compile.compiler import compile_strategy
several = [random_program(Random(seed), 5, 3, min_devices=3) for seed in range(12)]
several += [random_experts(Random(seed), 2, 2, 4) for seed in range(6)]
for program in several:
    compiled = compile_strategy(program.model, program.directives)
    print(compiled.dag.sequence, *map(repr, compiled.plans), sep="\\n")
"""


def printed(seed: str) -> str:
    paths = [str(TESTS), str(TESTS.parent / "src")]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *paths],
        capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed},
    )  # fmt: skip
    return done.stdout


def test_plans_are_the_same_whatever_the_hash_seed() -> None:
    first, second = printed("1"), printed("2")

    assert first == second
