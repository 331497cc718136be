"""Seeded synthetic routing counts in the shape of a rollout batch, for simulations without a trace.

A batch has M * G bins: what one source rank works through in one micro-batch. A bin is two samples
of together `tokens` tokens. 16 neighbouring samples answer one prompt and are alike; every prompt
belongs to one of three domains. Popularity of an expert in a layer, in log space, is a sum of
normal terms of the model, the domain, the prompt and the sample; the standard deviations are the
only knobs (`KINDS`). With weights w = exp(popularity), a token takes K experts by an exponential
race, so expert e is among them with probability 1 - exp(-t * w[e]), t such that these add up to K.

Order `grouped` leaves the rollouts of a prompt in neighbouring bins of one micro-batch; `random`
shuffles samples of equal length over the whole batch, so both orders have the same samples and the
same tokens in every bin.

What it lacks: co-activation of experts, bursts inside a sample, bins of different size. Counts are
simulated; nothing here says how a model routes.

Letters: M micro-batches, L MoE layers, G ranks, E experts, K choices a token, Q samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from relibra.limits import (
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_RANKS,
    MAX_TOKENS,
    check_count_bytes,
)
from relibra_kernels.checks import check_choice, check_int
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping

ORDERS = ("grouped", "random")
# Standard deviations of log popularity: model, domain, prompt, sample.
KINDS: Mapping[str, tuple[float, float, float, float]] = MappingProxyType(
    {
        "stable": (1.0, 0.7, 0.35, 0.25),
        "medium": (0.85, 0.9, 0.6, 0.35),
        "volatile": (0.6, 1.05, 0.85, 0.45),
        "qwenlike": (1.35, 0.8, 0.6, 0.4),
    }
)
_SAMPLES_OF_PROMPT, _DOMAINS, _SAMPLES_OF_BIN = 16, 3, 2
_SHARES = (0.25, 0.35, 0.45, 0.5)  # of a bin's first sample
_CHUNK = 64  # samples at a time; bounds the memory only

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SyntheticBatch:
    """Samples of a batch; `rows` lays them over micro-batches and ranks.

    Args:
        kind: of the popularity.
        num_ranks: G.
        num_micro_batches: M.
        tokens_Q: int64 `[Q]`, tokens of each sample; sample q is in bin q // 2.
        rows_QLE: int32 `[Q, L, E]`, rows of each sample.
        top_k: K.
        seed: of the batch.

    Example:
        >>> batch = make_batch("medium", num_ranks=4, num_micro_batches=2, num_layers=1,
        ...                    num_experts=8, top_k=2, tokens=100)
        >>> batch.rows("grouped").shape, int(batch.rows("random")[0, 0, 0].sum())
        ((2, 1, 4, 8), 200)
    """

    kind: str
    num_ranks: int
    num_micro_batches: int
    tokens_Q: npt.NDArray[np.int64]
    rows_QLE: npt.NDArray[np.int32]
    top_k: int
    seed: int

    def order(self, name: str) -> npt.NDArray[np.int64]:
        """Sample at each place, int64 `[Q]`; places 2b and 2b + 1 are bin b.

        Args:
            name: `grouped` or `random`.

        Raises:
            ValueError: another name.
        """
        check_choice("order", name, ORDERS)
        samples = np.arange(len(self.tokens_Q))
        if name == "random":
            key = _uniform(self.seed, 1, len(samples))
            for length in np.unique(self.tokens_Q):
                places = np.flatnonzero(self.tokens_Q == length)
                samples[places] = places[np.argsort(key[places], kind="stable")]
        return samples

    def rows(self, order: str) -> npt.NDArray[np.int32]:
        """Counts int32 `[M, L, G, E]`.

        Args:
            order: `grouped` or `random`.
        """
        held = self.rows_QLE[self.order(order)]
        bins = held[0::2] + held[1::2]
        shape = (self.num_micro_batches, self.num_ranks, *bins.shape[1:])
        return np.ascontiguousarray(bins.reshape(shape).transpose(0, 2, 1, 3))

    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of the samples of each rank, int64 `[M, G, 2]`; the same in every order."""
        return self.tokens_Q.reshape(self.num_micro_batches, self.num_ranks, _SAMPLES_OF_BIN)


def make_batch(
    kind: str = "medium",
    *,
    num_ranks: int,
    num_micro_batches: int = 16,
    num_layers: int = 4,
    num_experts: int = 128,
    top_k: int = 8,
    tokens: int = 8192,
    seed: int = 0,
) -> SyntheticBatch:
    """Makes a batch; equal arguments give equal counts.

    Args:
        kind: one of `KINDS`.
        num_ranks: G.
        num_micro_batches: M.
        num_layers: L.
        num_experts: E.
        top_k: K.
        tokens: of a rank in a micro-batch.
        seed: of the batch; the model's part of popularity does not depend on it.

    Raises:
        PlanError: an unknown kind, a size out of range, or counts of samples above 16 GiB.
    """
    if kind not in KINDS:
        raise PlanError(f"kind: need one of {', '.join(KINDS)}, got {kind!r}")
    for name, value, least, most in (
        ("num_ranks", num_ranks, 1, MAX_RANKS),
        ("num_micro_batches", num_micro_batches, 1, None),
        ("num_layers", num_layers, 1, MAX_LAYERS),
        ("top_k", top_k, 1, MAX_EXPERTS),
        ("num_experts", num_experts, top_k, MAX_EXPERTS),
        ("tokens", tokens, 20, MAX_TOKENS),
        ("seed", seed, 0, None),
    ):
        try:
            check_int(name, value, minimum=least, maximum=most)
        except (TypeError, ValueError) as error:
            raise PlanError(str(error)) from None
    check_count_bytes(2 * num_micro_batches, num_layers, num_ranks, num_experts)
    bins = num_micro_batches * num_ranks
    pick = (_uniform(seed, 0, bins) * len(_SHARES)).astype(np.int64)
    first = np.round(np.asarray(_SHARES)[pick] * tokens).astype(np.int64)
    tokens_Q = np.stack([first, tokens - first], axis=1).reshape(-1)
    rows = np.empty((len(tokens_Q), num_layers, num_experts), np.int32)
    popularity = _Popularity(kind, num_layers, num_experts, seed)
    for begin in range(0, len(tokens_Q), _CHUNK):
        samples = range(begin, min(begin + _CHUNK, len(tokens_Q)))
        chance = _chances(np.stack([popularity.of(q) for q in samples]), top_k)
        count = tokens_Q[samples.start : samples.stop, None, None]
        noise = np.stack([_normal(seed, 4, q, shape=chance.shape[1:]) for q in samples])
        wanted = count * chance + np.sqrt(count * chance * (1 - chance)) * noise
        rows[samples.start : samples.stop] = _whole(wanted, count[..., 0] * top_k, count)
    return SyntheticBatch(kind, num_ranks, num_micro_batches, tokens_Q, rows, top_k, seed)


class _Popularity:
    """Log popularity of samples, `[L, E]` each."""

    def __init__(self, kind: str, num_layers: int, num_experts: int, seed: int) -> None:
        self.shape, self.seed = (num_layers, num_experts), seed
        of_model, of_domain, self.of_prompt, self.of_sample = KINDS[kind]
        shared = of_model * _normal(100, shape=self.shape)
        own = _normal(101, shape=(_DOMAINS, *self.shape))
        self.by_domain = shared + of_domain * own
        self.last: tuple[int, FloatArray] = (-1, np.zeros(0))

    def of(self, sample: int) -> FloatArray:
        prompt = sample // _SAMPLES_OF_PROMPT
        if self.last[0] != prompt:
            domain = int(_uniform(self.seed, 2, 1, prompt)[0] * _DOMAINS)
            own = self.of_prompt * _normal(self.seed, 2, prompt, shape=self.shape)
            self.last = prompt, self.by_domain[domain] + own
        noise = self.of_sample * _normal(self.seed, 3, sample, shape=self.shape)
        return self.last[1] + noise


def _uniform(seed: int, stream: int, count: int, *more: int) -> FloatArray:
    """Uniform numbers of a stream of its own; the bits of PCG64 are the same everywhere."""
    generator = np.random.Generator(np.random.PCG64([seed, stream, *more]))
    return generator.random(count)


def _normal(seed: int, *stream: int, shape: tuple[int, ...]) -> FloatArray:
    """Standard normal numbers by the sine and cosine of Box and Muller."""
    size = int(np.prod(shape))
    uniform = _uniform(seed, 7, 2 * ((size + 1) // 2), *stream).reshape(2, -1)
    radius = np.sqrt(-2 * np.log1p(-uniform[0]))
    turn = 2 * np.pi * uniform[1]
    return np.concatenate([radius * np.sin(turn), radius * np.cos(turn)])[:size].reshape(shape)


def _chances(popularity: FloatArray, top_k: int) -> FloatArray:
    """Chance of each expert to be among a token's K, `[..., E]`, by bisection of log t."""
    weight = np.exp(popularity - popularity.max(-1, keepdims=True))
    low = np.full((*weight.shape[:-1], 1), -10.0)
    high = np.full_like(low, 60.0)
    for _ in range(50):
        middle = (low + high) / 2
        many = (-np.expm1(-np.exp(middle) * weight)).sum(-1, keepdims=True) > top_k
        high, low = np.where(many, middle, high), np.where(many, low, middle)
    chance: FloatArray = -np.expm1(-np.exp(low) * weight)
    return chance


def _whole(
    wanted: FloatArray, total: npt.NDArray[np.int64], most: npt.NDArray[np.int64]
) -> npt.NDArray[np.int32]:
    """Integers near `wanted` `[..., E]` that add up to `total` `[..., 1]`, each at most `most`."""
    rows = np.clip(wanted, 0, most)
    for _ in range(8):
        room = np.where(rows < most, rows, 0.0)
        missing = total[..., None] - rows.sum(-1, keepdims=True)
        rows = np.clip(
            rows + missing * room / np.maximum(room.sum(-1, keepdims=True), 1e-9), 0, most
        )
    whole = np.floor(rows)
    missing = (total[..., None] - whole.sum(-1, keepdims=True)).astype(np.int64)
    rest = np.where(whole < most, rows - whole, -1.0)
    rank = np.argsort(np.argsort(-rest, axis=-1, kind="stable"), axis=-1, kind="stable")
    rounded: npt.NDArray[np.int32] = (whole + (rank < missing)).astype(np.int32)
    return rounded
