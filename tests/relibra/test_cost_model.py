"""The cost model against the design's formulas, worked by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra.cost_model import CostModel, push_counts
from relibra.presets import HARDWARE, MODELS, Hardware
from relibra.shape import ModelShape
from relibra.token_copies import TokenCopies
from relibra.topology import Topology
from relibra_kernels.errors import PlanError

# Round numbers: c1 = 2 * 3*D*F / 1e12 with 3*D*F = 3e6 parameters; an expert has 6e6 bytes.
HARD = Hardware("test", 1.0, 2.0, 1000.0, 100.0, 10.0, 50.0, 5.0, 2.0, 80.0, 2)
SHAPE = ModelShape(8, 2, (0, 1), 1000, 1000)


def model(**values: object) -> CostModel:
    return CostModel(HARD, SHAPE, Topology(2, 2), block_rows=10, overlap=0.0).with_values(**values)


def copies(rdma: float, nvlink: float) -> TokenCopies:
    one = np.array([rdma]), np.array([nvlink])
    return TokenCopies(one[0], one[0] / 2, one[1] / 2, one[1], one[0])


class TestGemm:
    def test_slots_and_padded_rows(self) -> None:
        # two slots with rows: 2 * 2 us + (30 + 10) rows * 6 us
        assert model().gemm_seconds([21, 10, 0]) == pytest.approx(4e-6 + 40 * 6e-6)

    def test_floor_is_reading_the_weights(self) -> None:
        fast = model(hardware=HARD.with_values(gemm_tflop_per_s=1e6))
        assert fast.gemm_seconds([1, 1]) == pytest.approx(2 * 6e6 / 1e12)

    def test_no_rows_no_time(self) -> None:
        assert model().gemm_seconds(np.zeros((3, 4))).tolist() == [0, 0, 0]

    def test_row_of_the_presets(self) -> None:
        preset = MODELS["Qwen3-30B-A3B"]
        cost = CostModel(HARDWARE["H100"], preset.shape(), Topology(1, 8), preset)
        assert cost.row_s == pytest.approx(6 * 2048 * 768 / 600e12)
        # the design's push times: 25 us for one expert of Qwen3-30B at 380 GB/s
        engine = cost.with_values(hardware=cost.hardware.with_values(push_gb_per_s=380))
        assert engine.push_expert_s * 1e6 == pytest.approx(25, rel=0.01)


class TestReplicas:
    def test_gradients_in_memory(self) -> None:
        # 2 returns * 3 + 1 slot, 12e6 bytes each, 1e12 bytes a second
        assert model().replica_seconds(2, 1) == pytest.approx(7 * 12e6 / 1e12)

    def test_push_waits_for_the_fullest_link(self) -> None:
        seconds = model().push_seconds([3, 0, 1], [0, 2, 2])
        assert seconds == pytest.approx(5e-6 + 3 * 6e6 / 50e9)
        assert model().push_seconds([1, 1], [0, 2]) == pytest.approx(5e-6 + 2 * 6e6 / 50e9)
        assert model().push_seconds([0, 0], [0, 0]) == 0

    def test_gradients_home_are_twice_as_large(self) -> None:
        weights = model().push_seconds([1], [1]) - 5e-6
        assert model().push_seconds([1], [1], gradients=True) - 5e-6 == pytest.approx(2 * weights)

    def test_exposed_is_what_the_window_does_not_hide(self) -> None:
        rows, out, into = np.array([[10], [10]]), np.array([1, 0]), np.array([0, 1])
        push = float(model().push_seconds(out, into))
        home = float(model().push_seconds(out, into, gradients=True))
        parts = model().use_parts(rows, out, into, 1e-4)
        assert parts["push"] == pytest.approx(push - 1e-4)
        assert parts["push_backward"] == pytest.approx(push + home - 2e-4)
        hidden = model().use_parts(rows, out, into, 1.0)
        assert hidden["push"] == hidden["push_backward"] == 0

    def test_backward_is_twice_the_gemm_and_replica_gradients(self) -> None:
        rows, out, into = np.array([[10], [10]]), np.array([1, 0]), np.array([0, 1])
        parts = model().use_parts(rows, out, into, 1.0)
        slowest = 2 * model().gemm_seconds([10]) + 3 * 12e6 / 1e12  # the home rank
        assert parts["gemm_backward"] == pytest.approx(slowest)
        assert parts["replica"] == pytest.approx(3 * 12e6 / 1e12)

    def test_counts_of_pushes(self) -> None:
        home = np.array([[0, 0, 1, 1, 2, 2, 3, 3], [3, 3, 2, 2, 1, 1, 0, 0]])
        replicas = np.full((1, 2, 4, 2), -1)
        replicas[0, 0, 1, 0], replicas[0, 0, 2, 1], replicas[0, 1, 1, 0] = 0, 3, 0
        out, into = push_counts(replicas, home)
        assert out.tolist() == [[[1, 1, 0, 0], [0, 0, 0, 1]]]
        assert into.tolist() == [[[0, 1, 1, 0], [0, 1, 0, 0]]]


class TestAllToAll:
    def test_overlap_hides_the_shorter_link(self) -> None:
        # 100 copies of 1000 * 2 bytes: 20 us by rail, 300 inside: 6 us
        for overlap, expected in ((0.0, 26e-6), (0.5, 23e-6), (1.0, 20e-6)):
            seconds = model(overlap=overlap).all_to_all_seconds(copies(100, 300), 2.0)
            assert seconds[0] == pytest.approx(expected)

    def test_bytes(self) -> None:
        both = [model().all_to_all_seconds(copies(100, 300), size)[0] for size in (1.0, 2.0)]
        assert both[1] == pytest.approx(2 * both[0])


class TestDense:
    def test_attention_grows_with_the_square(self) -> None:
        cost = model(model=MODELS["Qwen3-30B-A3B"])
        assert cost.attention_pairs([4, 8]).tolist() == [10, 36]
        long = cost.dense_seconds([8192], [cost.attention_pairs(8192)])
        short = cost.dense_seconds([8192], [2 * cost.attention_pairs(4096)])
        assert long > short
        assert cost.dense_seconds([8192]) == pytest.approx(short)  # sequence_tokens = 4096

    def test_flops_by_hand(self) -> None:
        preset = MODELS["Qwen3-30B-A3B"]
        cost = model(model=preset)
        per_token = 2 * (2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128 + 2048 * 128)
        flops = 100 * per_token + 4 * 32 * 128 * 50
        assert cost.dense_seconds([100], [50])[0] == pytest.approx(flops / 2e12)

    def test_windowed_layers_see_less(self) -> None:
        cost = model(model=MODELS["gpt-oss-20b"])
        assert cost.attention_pairs(100) == pytest.approx(5050)  # within the window
        full, windowed = 1000 * 1001 / 2, 128 * 129 / 2 + 872 * 128
        assert cost.attention_pairs(1000) == pytest.approx((full + windowed) / 2)

    def test_without_a_model(self) -> None:
        assert model().dense_seconds([[5, 6]]).tolist() == [[0, 0]]

    def test_published_size_of_the_attention_forward(self) -> None:
        """The design: 2.1 / 5.5 / 15.9 ms at 8k tokens; one sequence, same order of magnitude."""
        for name, expected_ms in (
            ("Qwen3-30B-A3B", 2.1),
            ("Qwen3-235B-A22B", 5.5),
            ("DeepSeek-V3", 15.9),
        ):
            preset = MODELS[name]
            cost = CostModel(HARDWARE["H100"], preset.shape(), Topology(1, 8), preset)
            seconds = cost.dense_seconds([8192], [cost.attention_pairs(8192)])[0]
            assert 0.4 < seconds * 1e3 / expected_ms < 1.6


class TestWholeUse:
    def test_recompute_runs_the_forward_twice(self) -> None:
        rows, none = np.array([[10], [10]]), np.zeros(2)
        one = model().instance_seconds(rows, none, none)
        two = model(recompute="full").instance_seconds(rows, none, none)
        only = model().instance_seconds(rows, none, none, has_backward=False)
        gemm = float(model().gemm_seconds([10]))
        assert (only, one, two) == pytest.approx((gemm, 3 * gemm, 4 * gemm))
        assert model(recompute="full").repeats(has_backward=False) == (1, 0)

    @given(
        st.lists(st.lists(st.integers(0, 5000), min_size=2, max_size=2), min_size=4, max_size=4),
        st.integers(0, 3),
        st.integers(0, 1),
    )
    def test_more_rows_never_take_less(self, rows: list, rank: int, slot: int) -> None:
        before = np.array(rows)
        after = before.copy()
        after[rank, slot] += 100
        none = np.zeros(4)
        assert model().instance_seconds(after, none, none) >= model().instance_seconds(
            before, none, none
        )

    def test_leading_axes(self) -> None:
        rng = np.random.default_rng(0)
        rows = rng.integers(0, 500, (3, 2, 4, 5))
        out, into = rng.integers(0, 3, (2, 3, 2, 4))
        together = model().instance_seconds(rows, out, into, 1e-5)
        for place in np.ndindex(3, 2):
            alone = model().instance_seconds(rows[place], out[place], into[place], 1e-5)
            assert together[place] == pytest.approx(float(alone))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dispatch": "magic"}, "dispatch: need one of flat, two_hop, got 'magic'"),
        ({"combine": "sum"}, "combine: need one of reduced, exact"),
        ({"recompute": "some"}, "recompute: need one of none, full"),
        ({"overlap": 1.5}, r"overlap: need 0..1, got 1.5"),
        ({"overlap": float("nan")}, "overlap: need 0..1"),
        ({"block_rows": 0}, "block_rows: need 1 to 1048576, got 0"),
        ({"dispatch_bytes": 0}, "dispatch_bytes: need 0 < bytes"),
        ({"block_rows": 1 << 64}, "block_rows: need 1 to 1048576"),
        ({"block_rows": 1.5}, "block_rows: need an integer"),
        ({"in_flight": 1 << 64}, "in_flight: need 1 to 4096"),
        ({"sequence_tokens": 1 << 80}, "sequence_tokens: need 1 to"),
        ({"data_parallel": 0}, "data_parallel: need 1 to"),
        ({"window_s": -1.0}, "window_s: need seconds 0..1e\\+06"),
        ({"window_s": float("inf")}, "window_s: need seconds"),
        (
            {"hardware": HARDWARE["H100"].with_values(gemm_tflop_per_s=1e-3)},
            "hardware, shape: need at most 0.001 s for the GEMM of a row",
        ),
        (
            {"shape": ModelShape(8, 2, (0,), 1 << 20, 1 << 20)},
            "hardware, shape: need at most 0.001 s for the GEMM of a row",
        ),
        ({"shape": ModelShape(8, 2, (0,))}, "shape: need hidden_size and expert_size"),
        ({"hardware": "H100"}, "hardware: need Hardware, got str"),
    ],
)
def test_bad_input(values: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        model(**values)


def test_assumptions_name_every_choice() -> None:
    said = model(model=MODELS["Qwen3-30B-A3B"]).assumptions()
    assert said["cost"] == "time"
    assert {"dispatch", "combine", "overlap", "recompute", "window", "hardware"} <= set(said)
