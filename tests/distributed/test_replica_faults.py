"""One rank dies, stops or is late: every other rank says so in time, and training goes on."""

import pytest
from fault_world import POINTS, Fault, run_fault
from shared_memory import leaked_segments


def check_fault(fault):
    for rank, found in enumerate(run_fault(fault)):
        if found is None:
            assert rank == fault.victim
            continue
        assert isinstance(found, tuple), f"rank {rank}: {found}"
        message, seconds, same, maps = found
        assert message is not None, f"rank {rank} saw nothing"
        assert seconds < 2 * fault.timeout_s or rank == fault.victim, f"rank {rank}: {seconds} s"
        assert same, f"rank {rank}: parameters changed"
        assert maps == 0, f"rank {rank} still maps shared memory"
    assert leaked_segments() == []


FAULTS = {
    "kill-push": Fault("kill", "push"),
    "stop-compute": Fault("stop", "compute"),
    "kill-publish": Fault("kill", "publish", call=1),
    "slow-last-reduce": Fault("slow", "reduce", call=3),
}


@pytest.mark.parametrize("name", FAULTS)
def test_survivors_raise_in_time_and_train_again(name):
    check_fault(FAULTS[name])


@pytest.mark.slow
@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("kind", ["kill", "stop", "slow"])
def test_fault_matrix(kind, point, victim):
    check_fault(Fault(kind, point, victim, call=0 if point == "step end" else 1))
