"""64 micro-batches with 64 different row counts on two ranks: one compile, equal to eager."""

import gc

import numpy as np
import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from moe_world import Model, World

import relibra
from relibra_kernels.testing.launch import run_ranks


class Graded(World):
    """T tokens always; of micro-batch m, the first m go to experts of rank 1, the rest to rank 0.

    Then rank 0 receives other tokens, and computes other rows, in every micro-batch.
    """

    def tokens_of(self, rank, m):
        return self.tokens

    def ids(self, rank, m):
        half = self.num_experts // 2
        shape = (self.tokens, self.num_layers, half)
        order = np.argsort(self.rng(1, rank, m).random(shape), axis=-1)[..., : self.top_k]
        first = np.where(np.arange(self.tokens) < m, half, 0)
        return (order + first[:, None, None]).astype(np.int32)


WORLD = Graded(
    1, 2, num_experts=8, top_k=2, num_layers=2, micro_batches=64, tokens=70, hidden=8, expert=8
)


def train(rank, backend):
    """Two forwards in flight before each backward; outputs, gradients and sizes of all tables."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    runtime = relibra.Runtime(dist.group.WORLD, WORLD.topology, block_rows=1)
    model = Model(WORLD, rank, WORLD.num_ranks)
    runtime.attach(model)

    def layers(x, scores):
        for place, moe in enumerate(model.layers):
            x = x + moe(x, scores[place])
        return x

    run = torch.compile(layers, fullgraph=True, backend=counter) if backend else layers
    out, sizes, flying = [], set(), []
    with runtime.step(WORLD.random_plan(), {"train": WORLD.routes(rank)}) as step:
        for m in range(WORLD.micro_batches):
            x, scores, dy = WORLD.batch(rank, m)
            x.requires_grad_(), scores.requires_grad_()
            with step.forward(micro_batch=m):
                flying.append((x, scores, dy, run(x, scores)))
            tables = step._tables["train", m, 0]
            sizes.add((len(tables.token_choice_to_row_UK), len(tables.row_to_token_R)))
            if len(flying) == 2:
                for x, scores, dy, y in flying:
                    y.backward(dy)
                    out += [y.detach(), x.grad, scores.grad]
                flying, y = [], None
    gc.collect()
    assert not any(moe._opaque.kept for moe in model.layers)
    out += [param.grad for param in model.parameters()]
    runtime.close()
    return out, sizes, counter.frame_count


def compare_with_eager(rank, num_ranks, backend):
    expected, sizes, _ = train(rank, None)
    got, sizes_again, compiles = train(rank, backend)
    assert compiles == 1
    assert sizes == sizes_again
    assert len({u for u, _ in sizes}) > 1
    assert len(expected) == len(got)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    return len(sizes)


def test_comm_05_64_micro_batches_with_64_row_counts_compile_once():
    counts = run_ranks(2, compare_with_eager, "aot_eager", timeout=110.0)
    assert max(counts) == WORLD.micro_batches


@pytest.mark.slow
def test_64_micro_batches_with_64_row_counts_compile_once_under_inductor():
    assert run_ranks(2, compare_with_eager, "inductor", timeout=110.0)
