"""The experts' ops under every option, and the same by dense autograd in fp64."""

import dataclasses

import torch
from kernel_cases import KernelCase, slot_weights

from relibra_kernels.reference.activation import activate
from relibra_kernels.weights import WeightSet

relibra = torch.ops.relibra
D, F = 64, 128
RAGGED = KernelCase("ragged", (18, 0, 3, 0), num_home=2, spare_rows=16)
FAMILIES = KernelCase("families", (7, 0, 18, 5), num_home=2, num_static=1, num_choices=3)
ALPHA, LIMIT = 1.3, 0.8


@dataclasses.dataclass(frozen=True)
class Setup:
    """One choice of options."""

    case: KernelCase = FAMILIES
    layout: str = "contiguous"  # of kernel_cases, or "apart"
    activation: int = 0
    bias: bool = False
    score_at: str = "output"
    gathered: bool = True
    accumulate: bool = False

    def __str__(self):
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return ",".join(changed) or "plain"

    @property
    def halves(self):
        return 2 if self.activation <= 1 else 1

    def field(self, rows, columns, halves, dtype, seed):
        layout = "contiguous" if self.layout == "apart" else self.layout
        if halves == 1:
            layout = {"interleaved": "contiguous", "transposed_pairs": "transposed"}.get(
                layout, layout
            )
        field = self.case.weights(rows, columns, dtype, halves=halves, layout=layout, seed=seed)
        if self.layout != "apart" or halves == 1:
            return field
        return apart(field)

    def biases(self, rows, halves, dtype):
        if not self.bias:
            return [None] * 3
        logical = [
            None if b is None else b.view(len(b), halves, rows).double()
            for b in self.case.bias(rows, torch.float32, halves)
        ]
        pairs = halves == 2 and self.layout in ("interleaved", "transposed_pairs")
        return [
            None if b is None else (b.transpose(1, 2) if pairs else b).reshape(len(b), -1).to(dtype)
            for b in logical
        ]


def apart(field: WeightSet) -> WeightSet:
    """Gate and up weights of home in two tensors, the up tensor at the lower address."""
    up, gate = (field.home.chunk(2, dim=1)[i].clone() for i in (1, 0))
    return WeightSet((gate, up), field.static, field.replica, halves=2, halves_apart=True)


def home_list(field: WeightSet):
    return list(field.home) if isinstance(field.home, tuple) else [field.home]


def logical(field: WeightSet) -> list[torch.Tensor]:
    """[halves, rows, columns] of every slot."""
    if not field.halves_apart:
        return [x.double() for x in slot_weights(field)]
    home = [torch.stack([gate, up]).double() for gate, up in zip(*field.home, strict=True)]
    copies = [x for x in (field.static, field.replica) if x is not None]
    return home + [slot.double() for x in copies for slot in field.view(x)]


def empty_like(field: WeightSet, fill: float, dtype: torch.dtype) -> WeightSet:
    """Gradients that lie as the weights do; those of copies are NaN, to be overwritten."""

    def made(x, value):
        return None if x is None else torch.full_like(x, value, dtype=dtype)

    home = field.home
    pair = isinstance(home, tuple)
    filled = tuple(made(x, fill) for x in home) if pair else made(home, fill)
    return dataclasses.replace(
        field, home=filled, static=made(field.static, torch.nan),
        replica=made(field.replica, torch.nan),
    )  # fmt: skip


def run(setup: Setup, backend: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Forward and backward of one rank's experts through the ops."""
    case, wide = setup.case, torch.promote_types(dtype, torch.float32)
    w13 = setup.field(F, D, setup.halves, dtype, 3)
    w2 = setup.field(D, F, 1, dtype, 30)
    b13, b2 = setup.biases(F, setup.halves, dtype), setup.biases(D, 1, dtype)
    table = case.row_to_token
    x, dy = case.tokens(D, dtype), case.tokens(D, dtype, seed=9)
    score = torch.nan_to_num(case.row_score).to(wide)
    if not setup.gathered:
        x, dy = case.poison(x[table.clamp(min=0)]), case.poison(dy[table.clamp(min=0)])
    source = table if setup.gathered else None
    tiles = case.mtile, case.block_rows, False
    kind = setup.activation, ALPHA, LIMIT
    at_a = setup.score_at == "activation"
    h, a = relibra.expert_up(
        x, source, home_list(w13), w13.static, w13.replica, *tiles, *kind, w13.interleaved,
        w13.transposed, backend, *b13, score if at_a else None, w13.halves_apart,
    )  # fmt: skip
    y = relibra.expert_down(
        a, home_list(w2), w2.static, w2.replica, *tiles, w2.transposed, backend, *b2
    )
    dh, scored, dscore = relibra.expert_down_backward(
        dy, source, home_list(w2), w2.static, w2.replica, h, score, *tiles, *kind, w2.transposed,
        backend, *b2, setup.score_at,
    )  # fmt: skip
    dx = relibra.expert_up_backward(
        dh, home_list(w13), w13.static, w13.replica, *tiles, setup.halves == 2, w13.interleaved,
        w13.transposed, backend, w13.halves_apart,
    )  # fmt: skip
    found = {"y": y if at_a else y * score[:, None], "dx": dx, "dscore": dscore}
    pads = case.row_to_slot < 0
    assert not any(out[pads].any() for out in (h, a, y, dh, scored, dscore, dx))
    grads = [empty_like(w, 3.0 if setup.accumulate else torch.nan, wide) for w in (w13, w2)]
    if setup.gathered:
        wgrad(setup, (x, dy, dh, scored), grads, backend)
        found |= {"dw13": stacked(grads[0]), "dw2": stacked(grads[1])}
    if setup.bias:
        fill = 3.0 if setup.accumulate else torch.nan
        db = [
            None if b is None else torch.full_like(b, fill if i % 3 == 0 else torch.nan, dtype=wide)
            for i, b in enumerate((*b13, *b2))
        ]
        relibra.expert_bias_grad(
            dy, dh, source, None if at_a else score, torch.tensor(case.slot_rows),
            case.block_rows, db[0], db[2], db[3], db[5], setup.accumulate, backend, db[1], db[4],
            w13.interleaved, setup.halves == 2,
        )  # fmt: skip
        pairs = w13.interleaved
        db13 = torch.cat([one for one in db[:3] if one is not None])
        shape = (len(db13), F, 2) if pairs else (len(db13), setup.halves, F)
        db13 = db13.view(shape)
        found["db13"] = db13.transpose(1, 2) if pairs else db13
        found["db2"] = torch.cat([one for one in db[3:] if one is not None])
    return found


def wgrad(setup, operands, grads, backend):
    """Both weight gradients, into one tensor a family or into a list of home tensors."""
    w13, w2 = grads
    lists = [home_list(w) if isinstance(w.home, tuple) else None for w in grads]
    homes = [None if isinstance(w.home, tuple) else w.home for w in grads]
    relibra.expert_wgrad(
        *operands, setup.case.row_to_token, torch.tensor(setup.case.slot_rows),
        setup.case.block_rows, homes[0], w13.replica, homes[1], w2.replica, setup.accumulate,
        backend, w13.static, w2.static, w13.interleaved, w13.transposed, *lists, w13.halves_apart,
    )  # fmt: skip


def stacked(field: WeightSet) -> torch.Tensor:
    """[slots, halves, rows, columns]."""
    return torch.stack(logical(field))


def oracle(setup: Setup, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The same by autograd in fp64, a slot at a time."""
    case = setup.case
    w13 = stacked(setup.field(F, D, setup.halves, dtype, 3)).requires_grad_()
    w2 = stacked(setup.field(D, F, 1, dtype, 30)).requires_grad_()
    plain = dataclasses.replace(setup, layout="contiguous", bias=True)
    flat = [
        torch.cat([b.double() for b in plain.biases(rows, halves, dtype) if b is not None])
        for rows, halves in ((F, setup.halves), (D, 1))
    ]
    b13 = (flat[0].view(-1, setup.halves, F) * setup.bias).requires_grad_()
    b2 = (flat[1] * setup.bias).requires_grad_()
    table, slot_R = case.row_to_token, case.row_to_slot
    x = case.tokens(D, dtype).double()[table.clamp(min=0)].requires_grad_()
    dy = case.tokens(D, dtype, seed=9).double()[table.clamp(min=0)]
    score = torch.nan_to_num(case.row_score).double().requires_grad_()
    y = torch.zeros(case.num_rows, D, dtype=torch.float64)
    for slot in range(len(case.slot_rows)):
        rows = torch.nonzero(slot_R == slot).flatten()
        h = torch.cat([x[rows] @ w.T for w in w13[slot]], 1) + b13[slot].reshape(-1)
        a = activate(h, setup.activation, ALPHA, LIMIT)
        s = score[rows, None]
        if setup.score_at == "activation":
            out = (a * s) @ w2[slot, 0].T + b2[slot]
        else:
            out = (a @ w2[slot, 0].T + b2[slot]) * s
        y = y.index_copy(0, rows, out)
    y.backward(dy)
    leaves = {"dx": x, "dscore": score, "dw13": w13, "dw2": w2, "db13": b13, "db2": b2}
    found = {name: leaf.grad for name, leaf in leaves.items()}
    if setup.accumulate:
        for name in ("dw13", "dw2", "db13", "db2"):
            found[name][: case.num_home] += 3.0
    return {"y": y.detach(), **found}
