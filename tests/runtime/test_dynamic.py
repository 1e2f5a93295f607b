"""Values whose size depends on the data go from stage to stage, however receives are ordered."""

import dynamic
import pytest
import torch
from pool import run_on

from piper.strategies import BUILDERS


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_sizes_that_depend_on_data_cross_devices(schedule: str) -> None:
    strategy = BUILDERS[schedule](pp=2, microbatches=dynamic.PARTS).to_json()

    (losses, whole), _ = run_on(2, dynamic.train, strategy)

    wanted, parameters = dynamic.plain()
    assert losses == pytest.approx(wanted, rel=1e-6)
    assert whole is not None
    torch.testing.assert_close(whole, dict(parameters))
