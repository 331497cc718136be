"""Whole layers made of the ops, over a virtual EP group, against the dense reference."""

import numpy as np
import pytest
import torch

from relibra_kernels.reference.moe import dense_moe
from relibra_kernels.testing.compare import assert_close_gemm, assert_equal_bits, calc_diff
from relibra_kernels.testing.op_checks import check_layer
from relibra_kernels.testing.virtual_group import VirtualGroup, random_group, run_layer


@pytest.mark.parametrize("seed", range(8))
def test_random_plans(seed):
    """Ranks without tokens, slots without experts, K 1 to 8, zero to two replica slots."""
    rng = np.random.default_rng(seed)
    num_ranks = [1, 2, 4, 8][seed % 4]
    group = random_group(
        rng,
        num_ranks=num_ranks,
        num_home=8 // num_ranks + 1,
        num_replica=seed % 3,
        num_choices=[1, 2, 8, 4][(seed + seed // 4) % 4],
        tokens_G=[0, *rng.integers(1, 24, num_ranks)][:num_ranks] if seed % 2 else [17] * num_ranks,
        block_rows=[4, 16, 1][seed % 3],
        num_experts=8 + seed % 2,
    )
    check_layer(group, exact=bool(seed % 2), seed=seed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype):
    check_layer(random_group(np.random.default_rng(0), tokens_G=(40, 31)), dtype=dtype)


@pytest.mark.parametrize("num_choices", [1, 2, 8])
def test_kernel_07_weight_gradients_hold_the_score(num_choices):
    """`test_mutants` shows that this check fails when dW2 is made without the score."""
    rng = np.random.default_rng(num_choices)
    check_layer(random_group(rng, num_home=4, num_choices=num_choices))


@pytest.mark.parametrize("normalised", [False, True])
def test_kernel_08_one_choice_with_and_without_normalisation(normalised):
    """p / p is 1: the router learns nothing from one normalised choice. We never normalise."""
    rng = np.random.default_rng(0)
    group = random_group(rng, num_choices=1, skip=0.0)
    torch.manual_seed(0)
    logits = [torch.randn(len(one.ids_TK), group.num_experts) for one in group.ranks]
    x = [torch.randn(len(one.ids_TK), 12) for one in group.ranks]
    dy = [torch.randn_like(tokens) for tokens in x]
    w13, w2 = torch.randn(group.num_experts, 16, 12), torch.randn(group.num_experts, 12, 8)
    leaves = [one.requires_grad_() for one in logits]
    scores = [
        leaf.softmax(1).gather(1, one.ids_TK.long())
        for leaf, one in zip(leaves, group.ranks, strict=True)
    ]
    if normalised:
        scores = [score / score.sum(1, keepdim=True) for score in scores]
    with torch.no_grad():
        result = run_layer(group, x, scores, w13, w2, dy)
    torch.autograd.backward(scores, result.dscores_G)
    size = max(float(leaf.grad.abs().max()) for leaf in leaves)
    assert size < 1e-5 if normalised else size > 1e-2


def test_kernel_09_nan_in_padding_rows_of_a_bf16_layer():
    """Slots with ragged tails in their middle; every buffer starts as NaN in this test run."""
    group = random_group(np.random.default_rng(3), block_rows=16, tokens_G=(21, 5))
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert any((one.row_to_token_R[:-1] < 0).any() for one in group.ranks)
    result = check_layer(group, dtype=torch.bfloat16, sizes=(32, 32))
    assert {one.dtype for one in result.dscores_G} == {torch.float32}


@pytest.mark.parametrize("num_experts", [60, 72, 384])
def test_kernel_12_numbers_of_experts_that_fit_no_block(num_experts):
    rng = np.random.default_rng(num_experts)
    group = random_group(rng, num_home=num_experts // 2, tokens_G=(50, 41), num_choices=4)
    check_layer(group, sizes=(8, 8))


def single_slot_group(ids, slot_expert, quota, num_home, num_experts):
    return VirtualGroup.build(
        [torch.tensor(one, dtype=torch.int32) for one in ids],
        np.array(slot_expert),
        np.array(quota),
        num_home=num_home,
        num_experts=num_experts,
        block_rows=4,
    )


def test_all_tokens_on_one_expert_and_the_replica_serves_them_all():
    """Expert 0 lives on rank 0; every row is computed by its copy on rank 1."""
    ids = [[[0], [0], [0]], [[0], [0]]]
    quota = [[0, 0, 0, 3], [0, 0, 0, 2]]
    check_layer(single_slot_group(ids, [[0, -1], [1, 0]], quota, 1, 2))


def test_one_row_quotas():
    """Every expert on every rank, each slot at most one row of each source."""
    ids = [[[0, 1], [1, 0]], [[1, 0], [0, 1]]]
    quota = [[1, 1, 1, 1], [1, 1, 1, 1]]
    check_layer(single_slot_group(ids, [[0, 1], [1, 0]], quota, 1, 2))


def test_kernel_13_no_tokens_anywhere():
    group = random_group(np.random.default_rng(0), tokens_G=(0, 0))
    result = check_layer(group)
    assert_equal_bits("dw13", result.dw13_E, torch.zeros_like(result.dw13_E))


def test_exact_outputs_do_not_depend_on_the_plan():
    """The same ids under 8 random splits: every row's output keeps its bits."""
    rng = np.random.default_rng(0)
    first = random_group(rng, num_replica=2, skip=0.0, num_choices=1)
    x = [torch.randn(len(one.ids_TK), 12) for one in first.ranks]
    scores = [torch.rand(one.ids_TK.shape) for one in first.ranks]
    w13, w2 = torch.randn(first.num_experts, 16, 12), torch.randn(first.num_experts, 12, 8)
    outs = []
    for seed in range(8):
        group = rebuilt(first, seed)
        outs.append(run_layer(group, x, scores, w13, w2, x, exact=True))
    for out in outs[1:]:
        for name in ("y_G", "dx_G"):
            for a, b in zip(getattr(out, name), getattr(outs[0], name), strict=True):
                assert_equal_bits(name, a, b)


def rebuilt(group, seed):
    """The same ids with another random plan."""
    rng = np.random.default_rng(seed)
    other = random_group(rng, num_replica=2, skip=0.0, num_choices=1)
    quota = np.zeros_like(other.quota_GN)
    for source, one in enumerate(group.ranks):
        for expert, count in enumerate(np.bincount(one.ids_TK.flatten(), minlength=6)):
            slots = np.flatnonzero(other.slot_expert_Gn.reshape(-1) == expert)
            quota[source, slots] = rng.multinomial(count, rng.dirichlet(np.ones(slots.size)))
    return VirtualGroup.build(
        [one.ids_TK for one in group.ranks],
        other.slot_expert_Gn,
        quota,
        num_home=other.num_home,
        num_experts=other.num_experts,
        block_rows=4,
    )


def test_kernel_15_three_steps_with_tables_overwritten_after_each():
    """Nothing keeps a table: a host may reuse its memory as soon as an op has returned."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    ours = [torch.randn(6, 16, 12) / 4, torch.randn(6, 12, 8) / 4]
    loop = [w.clone().requires_grad_() for w in ours]
    for _ in range(3):
        group = random_group(rng, num_replica=2)
        ids = torch.cat([one.ids_TK for one in group.ranks]).clone()
        x = [torch.randn(len(one.ids_TK), 12) for one in group.ranks]
        scores = [torch.rand(one.ids_TK.shape) for one in group.ranks]
        result = run_layer(group, x, scores, *ours, x)
        for one in group.ranks:
            for table in (one.mtile_B4, one.row_to_token_R, one.slot_rows_n, one.ids_TK):
                table.fill_(2**31 - 1)
        y = dense_moe(torch.cat(x), ids, torch.cat(scores), *loop)
        grads = torch.autograd.grad(y, loop, torch.cat(x))
        ours = [w - 0.1 * g for w, g in zip(ours, (result.dw13_E, result.dw2_E), strict=True)]
        loop = [(w - 0.1 * g).detach().requires_grad_() for w, g in zip(loop, grads, strict=True)]
        assert_close_gemm("y", torch.cat(result.y_G), y)
        for name, a, b in zip(("w13", "w2"), ours, loop, strict=True):
            assert_close_gemm(name, a, b)


def test_the_dense_reference_equals_a_loop_over_tokens():
    torch.manual_seed(0)
    x, scores = torch.randn(5, 4).double(), torch.rand(5, 2).double()
    ids = torch.tensor([[0, 1], [2, -1], [1, 0], [-1, -1], [2, 0]])
    w13, w2 = torch.randn(3, 6, 4).double(), torch.randn(3, 4, 3).double()
    expected = torch.zeros(5, 4).double()
    for token in range(5):
        for choice in range(2):
            if (expert := int(ids[token, choice])) >= 0:
                gate, up = w13[expert, :3] @ x[token], w13[expert, 3:] @ x[token]
                y = w2[expert] @ (gate / (1 + torch.exp(-gate)) * up)
                expected[token] += scores[token, choice] * y
    assert calc_diff(dense_moe(x, ids, scores, w13, w2), expected) < 1e-28
