import numpy as np
import pytest

from relibra.demo.plots import fullest_place, micro_batch_imbalance, write_picture
from relibra.demo.records import StepLoads
from relibra.topology import Topology

LOADS = StepLoads(
    np.array([[[10, 0, 0, 6]], [[2, 2, 12, 0]]]),
    np.array([[[4, 4, 4, 4]], [[5, 3, 4, 4]]]),
    Topology(2, 2),
)


def test_imbalance_of_each_micro_batch():
    assert micro_batch_imbalance(LOADS.none_MLG) == [2.5, 3.0]
    assert micro_batch_imbalance(LOADS.balanced_MLG) == [1.0, 1.25]


def test_the_fullest_place_is_shown():
    assert fullest_place(LOADS) == (1, 0)


@pytest.mark.parametrize("steps", [0, 4])
def test_a_png_is_written(tmp_path, run_of, steps):
    path = tmp_path / "demo.png"
    write_picture(path, [LOADS], run_of(steps))
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.stat().st_size > 10_000
