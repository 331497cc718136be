"""Rows over two hops on real process groups."""

import pytest
import torch
import torch.distributed as dist

from relibra_kernels.errors import ReplicaSyncError
from relibra_kernels.testing.launch import run_ranks
from relibra_kernels.transport.two_hop import Relay, TwoHopDispatch


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def transport(rank):
    """The two groups of a rank of the 2 x 2 grid; `new_group` sorts, so the grid is in order."""
    rails = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return TwoHopDispatch(rails[rank % 2], nodes[rank // 2])


def there_and_back(rank, num_ranks, dtype):
    """Every rank sends token 10 * rank + n to both ranks of node n, and gets their sum back."""
    dispatch = transport(rank)
    x = torch.tensor([[10.0 * rank], [10.0 * rank + 1]], dtype=dtype)
    # One token over the rail from each node; both go on to both ranks of the node.
    out = Relay(True, [1, 1], [1, 1], int32([0, 1, 0, 1]), [2, 2], [2, 2])
    pending = dispatch.start(x, out, what="tokens")
    there = pending.wait()
    assert pending.wait() is there
    node = rank // 2
    expected = [10.0 * (2 * other + local) + node for local in range(2) for other in range(2)]
    assert there[:, 0].tolist() == expected
    # Both ranks of a node answer with the token plus their own rank; the relay rank adds the two.
    back = Relay(False, [2, 2], [2, 2], int32([[0, 2], [1, 3]]), [1, 1], [1, 1])
    sums = dispatch.start(there + rank, back, what="outputs").wait()
    ranks_of_node = [1.0, 5.0]
    assert sums[:, 0].tolist() == [2 * float(x[n, 0]) + ranks_of_node[n] for n in range(2)]
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_travel_and_return_summed(dtype):
    assert all(run_ranks(4, there_and_back, dtype))


def nothing(rank, num_ranks):
    dispatch = transport(rank)
    relay = Relay(True, [0, 0], [0, 0], int32([]), [0, 0], [0, 0])
    assert dispatch.start(torch.empty(0, 3), relay, what="tokens").wait().shape == (0, 3)
    sums = Relay(False, [0, 0], [0, 0], torch.empty(0, 2, dtype=torch.int32), [0, 0], [0, 0])
    assert dispatch.start(torch.empty(0, 3), sums, what="outputs").wait().shape == (0, 3)
    return True


def test_nothing_moves_at_all():
    assert all(run_ranks(4, nothing))


def lost_peer(rank, num_ranks):
    """The peer inside the node leaves between the hops."""
    import datetime

    timeout = datetime.timedelta(seconds=3.0)
    node = dist.new_group([0, 1], timeout=timeout)
    if rank == 1:
        return "left"
    relay = Relay(True, [1], [1], int32([0]), [0, 1], [0, 1])
    pending = TwoHopDispatch(None, node).start(torch.ones(1, 1), relay, what="layer 7: tokens")
    with pytest.raises(ReplicaSyncError, match="exchange of layer 7: tokens, node hop failed"):
        pending.wait()
    return "raised"


def test_a_failure_names_the_hop():
    assert run_ranks(2, lost_peer) == ["raised", "left"]


def test_a_sum_is_accumulated_in_fp32_and_rounded_once():
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    relay = Relay(False, [3], [3], int32([[0, 1, 2]]), [1], [1])
    assert relay.pass_on(rows).item() == 258.0  # adding in bf16 stays at 256
    assert relay.pass_on(rows).dtype == torch.bfloat16


def test_one_rank_passes_on_to_itself():
    relay = Relay(False, [2], [2], int32([[1, 0], [-1, 1]]), [2], [2])
    rows = torch.tensor([[3.0], [4.0]])
    out = TwoHopDispatch(None, None).start(rows, relay, what="x").wait()
    assert out.tolist() == [[7.0], [4.0]]


def test_bad_relays():
    with pytest.raises(TypeError, match="index: need dtype torch.int32"):
        Relay(True, [1], [1], torch.tensor([0]), [1], [1])
    with pytest.raises(ValueError, match=r"index: need \[2\] or \[2, J\], as many rows .* got \[1"):
        Relay(True, [1], [1], int32([0]), [2], [2])
    with pytest.raises(ValueError, match=r"got \[1, 1, 1\]"):
        Relay(True, [1], [1], int32([[[0]]]), [1], [1])
    relay = Relay(True, [1], [1], int32([0]), [1], [1])
    with pytest.raises(ValueError, match="x: need 1 rows"):
        TwoHopDispatch(None, None).start(torch.ones(2, 1), relay, what="x")
