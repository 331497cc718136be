"""The local layer on the ops of `relibra_kernels`, kernel by kernel (F1-F4, B1-B5)."""

import torch
from kernel_shapes import LayerProblem, Tables

import relibra_kernels.ops  # noqa: F401  registers the ops
from relibra_kernels.tables import m_tiles

ops = torch.ops.relibra


def build_tables(p: LayerProblem) -> Tables:
    """Every table from ids and the plan's quotas: what a step without a plan ahead would add."""
    lists = (p.ids, *p.quota)
    rows = ops.build_route(*lists, p.num_slots, 1, p.shape.num_received, p.backend)[2]
    tiles = m_tiles(p.slot_rows, p.num_home, p.block_rows)
    return Tables(rows, *ops.build_rows(rows, p.num_rows, p.backend), p.put(tiles))


def expert_up(p: LayerProblem, t: Tables, kind: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """F1: h and a."""
    (home, replica), _ = p.weights(kind)
    options = (0, 1.702, 7.0, False, False, p.backend)
    found: tuple[torch.Tensor, torch.Tensor] = ops.expert_up(
        p.x, t.row_to_token, [home], None, replica, t.tiles, p.block_rows, False, *options
    )
    return found


def forward(p: LayerProblem, t: Tables) -> tuple[torch.Tensor, torch.Tensor]:
    """F1 to F4: output of the source's tokens, and h for the backward."""
    h, a = expert_up(p, t)
    y = ops.grouped_gemm(a, *p.weights()[1], t.tiles, p.block_rows, False, p.backend)
    sums = ops.combine(y, t.token_choice_to_row, p.scores, p.backend)
    return ops.combine(sums, p.returned, None, p.backend), h


def down_backward(
    p: LayerProblem, t: Tables, h: torch.Tensor, score: torch.Tensor, kind: str = ""
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """B1: dh, score * a, gradients of the rows' scores."""
    _, (home, replica) = p.weights(kind)
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = ops.expert_down_backward(
        p.dy,
        t.row_to_token,
        [home],
        None,
        replica,
        h,
        score,
        t.tiles,
        p.block_rows,
        False,
        backend=p.backend,
    )
    return found


def wgrad(p: LayerProblem, t: Tables, dh: torch.Tensor, scored: torch.Tensor) -> None:
    """B2: home gradients are added to main_grad, the replica's overwritten."""
    rows = (p.x, p.dy, dh, scored, t.row_to_token, p.slot_rows_cpu, p.block_rows)
    ops.expert_wgrad(*rows, *p.gradients(), True, p.backend)


def backward(p: LayerProblem, t: Tables, h: torch.Tensor) -> list[torch.Tensor]:
    """B1, B3, B4, B5, B2: gradients of x, of the scores, and both weights' in main_grad."""
    score = ops.row_scores(p.scores, t.row_to_choice, t.token_choice_to_row, p.backend)
    dh, scored, dscore = down_backward(p, t, h, score)
    home, replica = p.weights()[0]
    dx = ops.grouped_gemm_dgrad(dh, home, replica, t.tiles, p.block_rows, False, p.backend)
    dx_sum = ops.combine(dx, t.token_choice_to_row, None, p.backend)
    dx_sum = ops.combine(dx_sum, p.returned, None, p.backend)
    dscores = ops.row_scores(dscore, t.token_choice_to_row, t.row_to_choice, p.backend)
    wgrad(p, t, dh, scored)
    return [dx_sum, dscores, p.grad13, p.grad2]
