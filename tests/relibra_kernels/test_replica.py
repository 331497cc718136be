"""Push and home-reduce over processes, and the two ops that call them."""

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from relibra_kernels.errors import ReplicaSyncError
from relibra_kernels.reference.home_reduce import home_reduce
from relibra_kernels.reference.replica_push import replica_push
from relibra_kernels.registry import register
from relibra_kernels.testing.compare import assert_equal_bits
from relibra_kernels.testing.launch import run_ranks
from relibra_kernels.transport.replica import DistReplica, ReplicaTransport

relibra = torch.ops.relibra


def int32(values):
    return torch.tensor(values, dtype=torch.int32).reshape(-1, 3)


def random_lists(rng, num_ranks, num_home, num_replica, fill=0.7):
    """Push and pull lists of every rank; some replica slots stay free."""
    pushes, pulls = ([[] for _ in range(num_ranks)] for _ in range(2))
    for rank in range(num_ranks):
        for slot in range(num_replica):
            home_rank, home_slot = int(rng.integers(num_ranks)), int(rng.integers(num_home))
            if rng.random() < fill:
                pushes[home_rank].append([home_slot, rank, slot])
                pulls[rank].append([slot, home_rank, home_slot])
    return [int32(one) for one in pushes], [int32(one) for one in pulls]


def buffers(num_ranks, num_home, num_replica, shape, dtype, seed):
    torch.manual_seed(seed)
    home = [torch.randn(num_home, *shape).to(dtype) for _ in range(num_ranks)]
    return home, [torch.randn(num_replica, *shape).to(dtype) for _ in range(num_ranks)]


def run_uses(rank, num_ranks, lists, dtype):
    """Several uses, each a push of two fields and a reduce; returns this rank's buffers."""
    transport, out = DistReplica(dist.group.WORLD), []
    for use, (push_G, pull_G) in enumerate(lists):
        fields = [buffers(num_ranks, 3, 2, shape, dtype, use) for shape in ((4, 5), (7,))]
        own = [(home[rank], replica[rank]) for home, replica in fields]
        shuffled = push_G[rank][torch.randperm(len(push_G[rank]))]
        transport.push(own, shuffled, pull_G[rank], what=f"use {use}")
        grads = [buffers(num_ranks, 3, 2, (4, 5), torch.float32, 100 + use)]
        grads_own = [(replica[rank], home[rank]) for home, replica in grads]
        transport.reduce(grads_own, shuffled, pull_G[rank], what=f"use {use}")
        out.append(([replica for _, replica in own], grads_own[0][1]))
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_single_process_reference_bit_for_bit(dtype):
    """Random lists, among them empty ones, copies on the own rank and ranks with nothing to do."""
    rng, num_ranks = np.random.default_rng(0), 4
    lists = [random_lists(rng, num_ranks, 3, 2, fill) for fill in (1.0, 0.7, 0.3, 0.1, 0.0)]
    found = run_ranks(num_ranks, run_uses, lists, dtype)
    for use, (push_G, _) in enumerate(lists):
        for field, shape in enumerate(((4, 5), (7,))):
            home, replica = buffers(num_ranks, 3, 2, shape, dtype, use)
            replica_push(home, replica, push_G)
            for rank in range(num_ranks):
                assert_equal_bits("replica", found[rank][use][0][field], replica[rank])
        home, replica = buffers(num_ranks, 3, 2, (4, 5), torch.float32, 100 + use)
        home_reduce(replica, home, push_G)
        for rank in range(num_ranks):
            assert_equal_bits("home gradient", found[rank][use][1], home[rank])


def test_gradients_are_added_in_ascending_rank_and_slot_order():
    """Each term changes the rounding of the next, and rank 3 answers first."""

    def fn(rank, num_ranks):
        time.sleep(0.0 if rank == 3 else 0.05 * (4 - rank))
        values = {1: (2.0**30, 1.0), 2: (-(2.0**30), 1.0), 3: (0.25, 2.0**-30)}
        replica = torch.tensor(values.get(rank, (0.0, 0.0)))[:, None]
        home = torch.tensor([[1.0]])
        push = [[0, peer, slot] for peer in (3, 1, 2) for slot in (1, 0)] if rank == 0 else []
        pull = [[1, 0, 0], [0, 0, 0]] if rank else []
        DistReplica(dist.group.WORLD).reduce([(replica, home)], int32(push), int32(pull), what="g")
        return home.item()

    # fp32: 1 + 2^30 + 1 - 2^30 + 1 + 0.25 + 2^-30 loses the first two ones; backwards it gives 0.
    assert run_ranks(4, fn) == [1.25, 1.0, 1.0, 1.0]


def test_an_empty_list_makes_no_call(monkeypatch):
    """A rank without work must not need the others: it does not touch the group."""
    transport = DistReplica(None)
    monkeypatch.setattr(dist, "batch_isend_irecv", pytest.fail)
    for move in (transport.push, transport.reduce):
        move([(torch.ones(1, 2), torch.ones(1, 2))], int32([]), int32([]), what="x")


def test_strided_home_weights_and_wide_sums_of_narrow_gradients():
    home = torch.arange(12.0).reshape(2, 2, 3).transpose(1, 2)
    replica = torch.zeros(1, 3, 2)
    DistReplica(None).push([(home, replica)], int32([[1, 0, 0]]), int32([[0, 0, 1]]), what="w")
    assert torch.equal(replica[0], home[1])
    total, narrow = torch.ones(1, 2), torch.full((1, 2), 2.0**-9).bfloat16()
    lists = int32([[0, 0, 0]]), int32([[0, 0, 0]])
    DistReplica(None).reduce([(narrow, total)], *lists, what="g")
    assert (total == 1 + 2.0**-9).all(), "summed in fp32"


ONE, OTHER = torch.ones(2, 3), torch.ones(1, 3)


@pytest.mark.parametrize(
    ("move", "fields", "push", "pull", "error", "message"),
    [
        (
            "push",
            (ONE, OTHER),
            [[2, 0, 0]],
            [],
            ValueError,
            r"push_list: need entries below \[2, 1, 1\]",
        ),
        (
            "push",
            (ONE, OTHER),
            [[0, 1, 0]],
            [],
            ValueError,
            r"push_list: need entries .* got \[0, 1, 0\]",
        ),
        (
            "push",
            (ONE, OTHER),
            [],
            [[0, 0, 2]],
            ValueError,
            r"pull_list: need entries below \[1, 1, 2\]",
        ),
        ("push", (ONE, OTHER.half()), [], [], TypeError, "replica: need dtype torch.float32"),
        ("push", (ONE, torch.ones(1, 4)), [], [], ValueError, r"replica: need shape \[any, 3\]"),
        (
            "push",
            (torch.ones(1, 2, 3), torch.ones(2, 3, 2).mT),
            [],
            [],
            ValueError,
            "replica: need contiguous memory",
        ),
        ("reduce", (OTHER, ONE.half()), [], [], TypeError, "home_grad: need dtype torch.float32"),
        (
            "reduce",
            (torch.ones(1, 4), ONE),
            [],
            [],
            ValueError,
            r"replica_grad: need shape \[any, 3\]",
        ),
        ("reduce", (OTHER, ONE), [[-1, 0, 0]], [], ValueError, "push_list: need entries"),
    ],
)
def test_wrong_arguments_are_refused(move, fields, push, pull, error, message):
    with pytest.raises(error, match=message):
        getattr(DistReplica(None), move)([fields], int32(push), int32(pull), what="x")


def test_wrong_lists_are_refused():
    for push, error in (
        (torch.zeros(0, 3), TypeError),
        (torch.zeros(3, dtype=torch.int32), ValueError),
    ):
        with pytest.raises(error, match="push_list: need"):
            DistReplica(None).push([(ONE, OTHER)], push, int32([]), what="x")


@pytest.mark.parametrize("move", ["push", "reduce"])
def test_a_partner_that_does_not_come_is_an_error_that_names_the_use(move):
    def fn(rank, num_ranks):
        if rank == 1:
            return None  # and stays until rank 0 has told
        pull = int32([[0, 1, 0]] if move == "push" else [])
        push = int32([[0, 1, 0]] if move == "reduce" else [])
        with pytest.raises(ReplicaSyncError) as caught:
            getattr(DistReplica(dist.group.WORLD), move)(
                [(torch.ones(1, 2), torch.ones(1, 2))], push, pull, what="step 3 layer 5"
            )
        assert isinstance(caught.value.__cause__, RuntimeError)
        return str(caught.value)

    name = {"push": "replica push", "reduce": "home reduce"}[move]
    message = run_ranks(2, fn, group_timeout=2.0)[0]
    assert message.startswith(f"{name} of step 3 layer 5 failed on rank 0 of 2: ")


def test_ops_find_their_transport():
    transport = DistReplica(None)
    assert isinstance(transport, ReplicaTransport)
    home, replica = torch.tensor([[1.0], [2.0]]), torch.zeros(1, 1)
    lists = int32([[1, 0, 0]]), int32([[0, 0, 1]])
    transport_id = register(transport)
    relibra.replica_push(home, replica, *lists, transport_id)
    assert replica.item() == 2.0
    relibra.home_reduce(replica, home, *lists, transport_id)
    assert home.flatten().tolist() == [1.0, 4.0]
    del transport
    with pytest.raises(ValueError, match="transport_id: need the id of a live object"):
        relibra.replica_push(home, replica, *lists, transport_id)
    other = torch.nn.Linear(1, 1)
    with pytest.raises(
        TypeError, match="transport_id: need the id of a ReplicaTransport, got Linear"
    ):
        relibra.home_reduce(replica, home, *lists, register(other))


def test_opcheck():
    transport = DistReplica(None)
    lists = int32([[1, 0, 0]]), int32([[0, 0, 1]])
    for op, first, second in (
        (relibra.replica_push, torch.randn(2, 3), torch.randn(1, 3)),
        (relibra.home_reduce, torch.randn(1, 3), torch.randn(2, 3)),
    ):
        torch.library.opcheck(op, (first, second, *lists, register(transport)))
