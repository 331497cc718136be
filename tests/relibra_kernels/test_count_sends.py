import numpy as np
import torch

import relibra_kernels  # noqa: F401  registers the ops
from relibra_kernels.testing.virtual_group import random_group, slot_quota

relibra = torch.ops.relibra


def test_a_token_counts_once_for_each_rank():
    """Four choices on two ranks: two sends, however the choices lie."""
    quota = slot_quota(np.arange(8), np.ones(8, np.int64), np.zeros(8, np.int64), 8).tensors()[:3]
    count = relibra.count_sends(torch.tensor([[0, 5, 1, 4]]), *quota, 4, 2)
    assert count.dtype == torch.int64
    assert count.tolist() == [1, 1]


def test_equals_the_distinct_tokens_of_the_route():
    for seed in range(5):
        group = random_group(np.random.default_rng(seed), num_ranks=3, tokens_G=(9, 0, 14))
        for rank, source in enumerate(group.ranks):
            assert sum(source.send_splits) == source.send_token_V.numel()
            for destination, tokens in zip(
                group.ranks, torch.split(source.send_token_V, source.send_splits), strict=True
            ):
                assert destination.recv_splits[rank] == tokens.unique().numel() == tokens.numel()


def test_opcheck():
    quota = slot_quota(np.arange(8), np.ones(8, np.int64), np.zeros(8, np.int64), 8).tensors()[:3]
    ids = torch.tensor([[0, 5], [1, -1]], dtype=torch.int32)
    torch.library.opcheck(relibra.count_sends, (ids, *quota, 4, 2))
