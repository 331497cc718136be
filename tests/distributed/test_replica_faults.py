"""One rank dies, stops or is late: every other rank says so in time, and training goes on."""

import re

import pytest
from fault_world import POINTS, ROW_POINTS, Fault, run_fault
from shared_memory import leaked_segments


def names(message, rank):
    """Whether a message says which rank was waited for in vain."""
    silent = re.search(r"no word so far from rank\(s\) \[([\d, ]+)\]", message)
    waited = re.search(rf"(in vain for rank|since rank|Rank) {rank}\b", message)
    return bool(waited or (silent and str(rank) in silent[1].split(", ")))


def check_fault(fault):
    results = run_fault(fault)
    for rank, found in enumerate(results):
        if found is None:
            assert rank == fault.victim
            continue
        assert isinstance(found, tuple), f"rank {rank}: {found}"
        message, seconds, same, maps = found
        assert message is not None, f"rank {rank} saw nothing"
        assert seconds < 2 * fault.timeout_s or rank == fault.victim, f"rank {rank}: {seconds} s"
        assert same, f"rank {rank}: parameters changed"
        assert maps == 0, f"rank {rank} still maps shared memory"
        if rank != fault.victim:
            assert re.search(r"micro-batch \d, layer \d|optimizer step 0", message), message
            assert names(message, fault.victim), f"rank {rank}: {message}"
    assert leaked_segments() == []
    if fault.point in ROW_POINTS and fault.dispatch == "peer":
        told = [found[0] for rank, found in enumerate(results) if rank != fault.victim]
        assert any(f"in vain for rank {fault.victim}" in message for message in told), told
        assert any("exchange of rows of optimizer step 0, train, mic" in m for m in told), told


FAULTS = {
    "kill-push": Fault("kill", "push"),
    "stop-compute": Fault("stop", "compute"),
    "kill-publish": Fault("kill", "publish", call=1),
    "slow-last-reduce": Fault("slow", "reduce", call=3),
    "kill-dispatch-peer": Fault("kill", "dispatch", call=1, dispatch="peer"),
    "slow-combine-peer": Fault("slow", "combine", victim=1, call=2, dispatch="peer"),
    "stop-dispatch-flat": Fault("stop", "dispatch", call=1),
}


@pytest.mark.parametrize("name", FAULTS)
def test_survivors_raise_in_time_and_train_again(name):
    check_fault(FAULTS[name])


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["peer", "flat"])
@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("point", ROW_POINTS)
@pytest.mark.parametrize("kind", ["kill", "stop", "slow"])
def test_fault_matrix_of_rows(kind, point, victim, dispatch):
    check_fault(Fault(kind, point, victim, call=1, dispatch=dispatch))


@pytest.mark.slow
@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("point", [point for point in POINTS if point not in ROW_POINTS])
@pytest.mark.parametrize("kind", ["kill", "stop", "slow"])
def test_fault_matrix(kind, point, victim):
    check_fault(Fault(kind, point, victim, call=0 if point == "step end" else 1))
