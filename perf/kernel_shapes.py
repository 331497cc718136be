"""A rank's share of a MoE layer in the sizes of published models: tables, tensors, reference, cost.

Source of the sizes: `relibra.presets`. A rank of EP 8 holds E/8 home experts and one replica slot.
Activations are SwiGLU without biases for every model (gpt-oss has both otherwise).

Letters as in `relibra_kernels.tables`; "compact" rows are the real ones, without padding, by slot.
"""

import dataclasses
import functools
import math

import numpy as np
import torch
import torch.nn.functional as F

from relibra.presets import MODELS
from relibra.synthetic import make_batch
from relibra_kernels.ops.gemm_launch import default_block_rows
from relibra_kernels.tables import FAMILY_SHIFT, REPLICA, m_tiles, slot_bases

MODEL_NAMES = ("Qwen3-30B-A3B", "Qwen3-235B-A22B", "GLM-4.5-Air", "DeepSeek-V3", "gpt-oss-120b")
TOKENS = (8192, 16384, 32768)
DISTRIBUTIONS = ("medium", "uniform")
NUM_RANKS = 8


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """Sizes of one benchmark point.

    Attributes:
        model: name.
        tokens: T, of every source rank.
        distribution: of rows over slots, "medium" (`relibra.synthetic`) or "uniform".
        hidden: D.
        expert: F.
        num_experts: E of the whole group of 8 ranks.
        top_k: K.
    """

    model: str
    tokens: int
    distribution: str
    hidden: int
    expert: int
    num_experts: int
    top_k: int

    @property
    def case(self) -> str:
        """Name in printed lines and JSON."""
        return f"{self.model} T={self.tokens} {self.distribution}"

    @property
    def num_home(self) -> int:
        """H."""
        return self.num_experts // NUM_RANKS

    @property
    def num_received(self) -> int:
        """U: of 8T tokens, those that choose this rank at least once if choices are even."""
        share = 1 - (1 - 1 / NUM_RANKS) ** self.top_k
        return min(round(NUM_RANKS * self.tokens * share), sum(self.slot_rows))

    @functools.cached_property
    def slot_rows(self) -> list[int]:
        """Rows of the home slots, then of the replica slot; together about T * K."""
        wanted = self.tokens * self.top_k
        if self.distribution == "uniform":
            share, more = divmod(wanted, self.num_home + 1)
            return [share + (slot < more) for slot in range(self.num_home + 1)]
        batch = make_batch(
            "medium",
            num_ranks=NUM_RANKS,
            num_micro_batches=1,
            num_layers=1,
            num_experts=self.num_experts,
            top_k=self.top_k,
            tokens=self.tokens,
        )
        return balanced_rank(batch.rows("grouped")[0, 0].sum(0), wanted)


def balanced_rank(load_E: np.ndarray, wanted: int) -> list[int]:
    """Slots of the least loaded rank, whose replica takes what is missing to the mean.

    The replica copies the hottest expert of the other ranks and cannot take more than its load.

    Args:
        load_E: rows of every expert, in order of the ranks that hold them.
        wanted: mean rows of a rank.

    Returns:
        Rows of the home slots, then of the replica slot.
    """
    load_GH = np.asarray(load_E).reshape(NUM_RANKS, -1)
    rank = int(load_GH.sum(1).argmin())
    hottest = int(np.delete(load_GH, rank, axis=0).max())
    missing = max(0, wanted - int(load_GH[rank].sum()))
    return [*load_GH[rank].tolist(), min(missing, hottest)]


def model_shape(name: str, tokens: int, distribution: str) -> LayerShape:
    """A point of a published model."""
    m = MODELS[name]
    sizes = (m.hidden_size, m.expert_size, m.num_experts, m.top_k)
    return LayerShape(name, tokens, distribution, *sizes)


def small_shapes(smoke: bool) -> list[LayerShape]:
    """What a CPU can run."""
    if smoke:
        return [LayerShape("smoke", 24, "medium", 64, 64, 16, 2)]
    return [LayerShape("small", 256, each, 256, 128, 64, 4) for each in DISTRIBUTIONS]


@dataclasses.dataclass(frozen=True)
class Tables:
    """What a destination needs of one use, on the device."""

    token_choice_to_row: torch.Tensor
    row_to_token: torch.Tensor
    row_to_choice: torch.Tensor
    tiles: torch.Tensor


class LayerProblem:
    """Tables, weights, inputs and buffers of one rank.

    Args:
        shape: sizes.
        device: where they live.
        dtype: of rows and weights.
        seed: of the values; tables depend on the shape only.
        backend: of the ops.
    """

    def __init__(
        self,
        shape: LayerShape,
        device: torch.device,
        dtype: torch.dtype,
        seed: int = 0,
        backend: str = "auto",
    ) -> None:
        self.shape, self.device, self.dtype, self.backend = shape, device, dtype, backend
        self.block_rows = default_block_rows(device, backend)
        self.slot_rows, self.num_home = shape.slot_rows, shape.num_home
        self.num_slots, self.num_real = len(self.slot_rows), sum(self.slot_rows)
        self.base = slot_bases(self.slot_rows, self.block_rows)
        self.num_rows = int(self.base[-1])
        self.slot_rows_cpu = torch.tensor(self.slot_rows, dtype=torch.int32)
        self._make_tables()
        self._make_values(torch.Generator(device).manual_seed(seed))

    def _make_tables(self) -> None:
        """Ids with the wanted rows a slot: every token has one choice here, others by chance."""
        rng, (u, k) = np.random.default_rng(0), (self.shape.num_received, self.shape.top_k)
        others = np.flatnonzero(np.arange(u * k) % k)
        taken = rng.permutation(others)[: self.num_real - u]
        spots = np.sort(np.concatenate([np.arange(0, u * k, k), taken]))
        slots = rng.permutation(np.repeat(np.arange(self.num_slots), self.slot_rows))
        ids = np.full(u * k, -1, np.int32)
        ids[spots] = slots
        order = np.argsort(slots, kind="stable")
        rows = np.repeat(self.base[:-1].numpy(), self.slot_rows)
        start = np.cumsum(self.slot_rows) - self.slot_rows
        rows = rows + np.arange(self.num_real) - np.repeat(start, self.slot_rows)
        places = np.full(u * k, -1, np.int32)
        places[spots[order]] = rows
        returned = np.full(self.shape.tokens * min(k, NUM_RANKS), -1, np.int32)
        returned[rng.permutation(returned.size)[:u]] = np.arange(u)
        self.ids = self.put(torch.from_numpy(ids.reshape(u, k)))
        self.real = self.put(torch.from_numpy(rows))  # place of every compact row
        self.compact_spot = self.put(torch.from_numpy(spots[order]))
        self.compact_token = self.compact_spot // k
        self.offsets = self.put(torch.from_numpy(np.cumsum(self.slot_rows).astype(np.int32)))
        self.returned = self.put(torch.from_numpy(returned.reshape(self.shape.tokens, -1)))
        self.quota = tuple(
            self.put(torch.as_tensor(one, dtype=torch.int32))
            for one in (
                range(self.num_slots + 1),
                range(self.num_slots),
                self.slot_rows,
                self.base[:-1].tolist(),
            )
        )
        table = torch.from_numpy(places.reshape(u, k))
        found = torch.ops.relibra.build_rows(table, self.num_rows, "reference")
        tiles = m_tiles(self.slot_rows, self.num_home, self.block_rows)
        self.tables = Tables(*map(self.put, (table, *found, tiles)))

    def _make_values(self, generator: torch.Generator) -> None:
        n, hidden, expert = self.num_slots, self.shape.hidden, self.shape.expert

        def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
            values = torch.empty(size, dtype=self.dtype, device=self.device)
            return values.normal_(0, scale, generator=generator)

        self.x, self.dy = (normal(self.shape.num_received, hidden) for _ in range(2))
        scores = torch.rand(self.ids.shape, generator=generator, device=self.device)
        self.scores = scores * 0.9 + 0.1
        self.w13 = normal(n, 2 * expert, hidden, scale=hidden**-0.5)
        self.w2 = normal(n, hidden, expert, scale=expert**-0.5)
        self.copy13, self.copy2 = self.w13.clone(), self.w2.clone()  # where replicas are
        self.grad13, self.grad2 = (
            torch.zeros(w.shape, dtype=torch.float32, device=self.device)
            for w in (self.w13, self.w2)
        )

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)

    def weights(self, kind: str = "") -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """(home, replica) of w13 and of w2; kind "" as a rank has them, "all home", "half"."""
        pairs = ((self.w13, self.copy13), (self.w2, self.copy2))
        if kind == "half":
            return pairs
        cut = self.num_slots if kind == "all home" else self.num_home
        return tuple((home[:cut], copy[cut:]) for home, copy in pairs)

    def tiles(self, kind: str = "") -> torch.Tensor:
        """Tiles for `weights` of that kind; "half": every second tile reads the replica base."""
        if not kind:
            return self.tables.tiles
        tiles = m_tiles(self.slot_rows, self.num_slots, self.block_rows)
        if kind == "half":
            tiles[1::2, 0] |= REPLICA << FAMILY_SHIFT
        return self.put(tiles)

    def padded(self, compact: torch.Tensor) -> torch.Tensor:
        """Rows of the kernels' buffers, zeros in the padding."""
        out = compact.new_zeros(self.num_rows, *compact.shape[1:], dtype=self.dtype)
        out[self.real] = compact.to(self.dtype)
        return out

    def gradients(self) -> tuple[torch.Tensor, ...]:
        """Home and replica parts of both fp32 gradient buffers."""
        cut = self.num_home
        return self.grad13[:cut], self.grad13[cut:], self.grad2[:cut], self.grad2[cut:]

    def reset(self) -> None:
        """Zeros in the gradient buffers."""
        self.grad13.zero_()
        self.grad2.zero_()


def reference(p: LayerProblem) -> dict[str, torch.Tensor]:
    """Everything of a layer in fp32, slot by slot: compact rows, sums of tokens, gradients."""
    parts: dict[str, list[torch.Tensor]] = {}
    score = p.scores.reshape(-1)[p.compact_spot, None]
    for slot, (end, rows) in enumerate(zip(p.offsets.tolist(), p.slot_rows, strict=True)):
        here = slice(end - rows, end)
        token = p.compact_token[here]
        x, dy, s = p.x[token].float(), p.dy[token].float(), score[here]
        w13, w2 = p.w13[slot].float(), p.w2[slot].float()
        h = (x @ w13.T).to(p.dtype).float()  # the layer rounds h, and computes the rest from it
        gate, up = h.chunk(2, 1)
        sigmoid = gate.sigmoid()
        a = gate * sigmoid * up
        g = dy @ w2
        da = g * s
        dh = torch.cat([da * up * sigmoid * (1 + gate * (1 - sigmoid)), da * F.silu(gate)], 1)
        found = {"h": h, "a": a, "y": a @ w2.T, "dh": dh, "scored": a * s, "dx": dh @ w13}
        found |= {"dscore": (g * a).sum(1), "dw13": (dh.T @ x)[None]}
        found |= {"dw2": (dy.T @ (a * s))[None]}
        for name, value in found.items():
            parts.setdefault(name, []).append(value)
    out = {name: torch.cat(values) for name, values in parts.items()}
    zeros = p.x.new_zeros(p.x.shape, dtype=torch.float32)
    out["out"] = send_back(p, zeros.index_add(0, p.compact_token, out["y"] * score))
    out["dx_sum"] = send_back(p, zeros.index_add(0, p.compact_token, out["dx"]))
    flat = p.scores.new_zeros(p.scores.numel())
    out["dscores"] = flat.index_copy(0, p.compact_spot, out["dscore"]).view(p.scores.shape)
    return out


def send_back(p: LayerProblem, sums: torch.Tensor) -> torch.Tensor:
    """The source's sum over ranks, in torch."""
    taken = sums[p.returned.clamp(min=0).long()]
    return torch.where(p.returned[..., None] >= 0, taken, 0).sum(1)


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a piece of work needs at least: operations, and bytes that must move."""

    flops: float
    num_bytes: float

    def bound_us(self, flops_per_s: float, bytes_per_s: float) -> float:
        """The larger of both times."""
        return 1e6 * max(self.flops / flops_per_s, self.num_bytes / bytes_per_s)


def costs(p: LayerProblem) -> dict[str, Cost]:
    """Cost of each kernel, padding left out; a GEMM reads each operand once."""
    shape, item, rows = p.shape, p.dtype.itemsize, p.num_real
    d, f = shape.hidden, shape.expert
    used = sum(count > 0 for count in p.slot_rows)
    tokens, h, a, wide = shape.num_received * d, rows * 2 * f, rows * f, rows * d
    w13, w2, source = used * 2 * f * d, used * d * f, shape.tokens * d
    home_used = sum(count > 0 for count in p.slot_rows[: p.num_home])
    grads = 4 * 3 * d * f * (2 * home_used + p.num_slots - p.num_home)
    unit = rows * d * f
    return {
        "F1 expert_up": Cost(4 * unit, item * (tokens + w13 + h + a)),
        "F2 grouped_gemm": Cost(2 * unit, item * (a + w2 + wide)),
        "F3 combine": Cost(0, item * (wide + tokens)),
        "F4 combine": Cost(0, item * (tokens + source)),
        "B1 expert_down_backward": Cost(2 * unit, item * (tokens + w2 + 2 * h + a)),
        "B2 expert_wgrad": Cost(6 * unit, item * (2 * tokens + h + a) + grads),
        "B3 grouped_gemm_dgrad": Cost(4 * unit, item * (h + w13 + wide)),
        "B4 combine": Cost(0, item * (wide + tokens)),
        "B5 combine": Cost(0, item * (tokens + source)),
    }


def total(parts: dict[str, Cost], letter: str, rates: tuple[float, float]) -> tuple[float, float]:
    """Operations and the bound in microseconds of a whole forward ("F") or backward ("B")."""
    chosen = [cost for name, cost in parts.items() if name.startswith(letter)]
    return sum(c.flops for c in chosen), math.fsum(c.bound_us(*rates) for c in chosen)
