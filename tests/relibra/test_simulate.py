"""The simulator: inputs, ratios, rerouted rows, and that balance pays where it must."""

import json

import numpy as np
import pytest

from relibra.load_matrix import LoadMatrix
from relibra.pass_cost import executed_rows
from relibra.plan_config import PlannerConfig
from relibra.planner import STRATEGIES, plan_step
from relibra.presets import HARDWARE, MODELS
from relibra.shape import ModelShape
from relibra.simulate import SimulateSettings, fullest_instance, rank_rows, reroute, simulate
from relibra.simulate_input import CountsSource, SyntheticSource, TraceSource
from relibra.simulate_report import as_json, main_table, overlap_table, reroute_table
from relibra.topology import Topology
from relibra.trace import RoutingTrace
from relibra_kernels.errors import PlanError

SOURCE = SyntheticSource("medium", 4, 2, 32, 4, 4096)
NAMES = ("none", "eplb_oracle", "relibra", "ideal")


def settings(**values: object) -> SimulateSettings:
    chosen = {
        "ep": (8, 16),
        "strategies": NAMES,
        "planner": PlannerConfig(proposals=2000, num_threads=1),
    }
    return SimulateSettings(
        values.pop("model", MODELS["Qwen3-30B-A3B"]), HARDWARE["H100"], **(chosen | values)
    )


@pytest.fixture(scope="module")
def batches():
    return simulate(SOURCE, settings(reroute=(0, 10, 30)))


def trace(samples: int = 12, seed: int = 0) -> RoutingTrace:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(20, 60, samples)
    heat = np.linspace(2, 0, 16) + rng.gumbel(size=(int(lengths.sum()), 2, 16))
    ids = np.argsort(-heat, axis=2)[:, :, :4].astype(np.uint8)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return RoutingTrace(ids, cu_seqlens=starts, moe_layers=(0, 1), num_experts=16)


class TestBatches:
    def test_every_size_and_order(self, batches) -> None:
        got = [(batch.num_ranks, batch.order) for batch in batches]
        assert got == [(8, "grouped"), (8, "random"), (16, "grouped"), (16, "random")]
        assert all(set(batch.results) == set(NAMES) for batch in batches)

    def test_relibra_gains_and_nothing_beats_ideal(self, batches) -> None:
        for batch in batches:
            assert batch.ratio("none") == 1
            assert batch.ratio("relibra", net=False) > 1.1
            for name in NAMES:
                assert batch.ratio("ideal", net=False) >= batch.ratio(name, net=False) * 0.999

    def test_gross_is_not_below_net(self, batches) -> None:
        for batch in batches:
            one = batch.results["relibra"]
            for (overlap, net, dense), seconds in one.step_s.items():
                if net:
                    extra = one.move_s + one.planner_s
                    assert seconds >= one.step_s[overlap, False, dense] + extra

    def test_overlap_never_hurts(self, batches) -> None:
        for one in batches[2].results.values():
            steps = [one.step_s[overlap, False, "max"] for overlap in (0.0, 0.5, 0.8, 1.0)]
            assert steps == sorted(steps, reverse=True)

    def test_rerouted_rows_bring_imbalance_back(self, batches) -> None:
        for batch in batches:
            values = [one[1] for one in batch.results["relibra"].rerouted.values()]
            assert values == sorted(values)
            assert values[-1] < batch.results["none"].rerouted[30][1]
            zero = batch.results["relibra"].rerouted[0]
            assert zero[0] == pytest.approx(batch.results["relibra"].step_s[0.5, True, "max"])

    def test_rank_rows_of_the_fullest_instance(self, batches) -> None:
        place = fullest_instance(batches[0])
        none, ours = (rank_rows(batches[0], name, *place) for name in ("none", "relibra"))
        assert sum(none) == sum(ours) == 8 * 4096 * 4
        assert max(none) == batches[0].results["none"].plan.report.worst_rank_rows
        assert max(ours) < max(none)

    def test_tables_have_a_row_for_each_strategy(self, batches) -> None:
        for table in (
            main_table(batches[0]),
            overlap_table(batches[0], (0.0, 1.0)),
            reroute_table(batches[0], (0, 10)),
        ):
            assert table.row_count == len(NAMES)

    def test_json_says_its_assumptions(self, batches) -> None:
        said = json.loads(json.dumps(as_json(SOURCE, settings(reroute=(0, 10, 30)), batches)))
        assert said["simulated"] is True
        assumptions = said["assumptions"]
        for name in ("dispatch", "overlap", "recompute", "hardware", "planner_cost_mode"):
            assert name in assumptions
        step = said["batches"][0]["strategies"]["relibra"]["step"]
        keys = {(one["overlap"], one["net"], one["dense_imbalance"]) for one in step}
        assert len(keys) == 4 * 2 * 2


class TestComposed:
    """Order `composed`: the same samples in other micro-batches, composing paid for."""

    @pytest.mark.parametrize("ranks", [2, 4, 8])
    def test_a_trace_keeps_its_sequences(self, ranks: int) -> None:
        source = TraceSource(trace(14), sequences=4)  # 3 whole micro-batches and 2 sequences
        composed, grouped = (source.make(ranks, order) for order in ("composed", "grouped"))
        rows = [one.loads.totals_MLE for one in (composed, grouped)]
        assert np.array_equal(rows[0].sum(0), rows[1].sum(0))
        assert np.array_equal(rows[0][3], rows[1][3])
        uneven = [np.abs(one[:3] - one[:3].mean(0)).sum() for one in rows]
        assert uneven[0] < uneven[1]
        assert composed.compose_s > grouped.compose_s == 0

    def test_the_generator(self) -> None:
        composed, grouped = (SOURCE.make(8, order) for order in ("composed", "grouped"))
        rows = [one.loads.totals_MLE for one in (composed, grouped)]
        assert np.array_equal(rows[0].sum(0), rows[1].sum(0))
        assert composed.pieces[:, 2].sum() == 8 * 4 * 4096
        cells = np.bincount(composed.pieces[:, 0] * 8 + composed.pieces[:, 1],
                            composed.pieces[:, 2])  # fmt: skip
        assert cells.max() <= 1.03 * 4096 + 1
        batch = simulate(SOURCE, settings(ep=(8,)), orders=("composed",))[0]
        for one in batch.results.values():
            net, gross = (one.step_s[0.5, net, "max"] for net in (True, False))
            assert net >= gross + one.planner_s + one.move_s

    def test_counts_cannot_be_composed(self) -> None:
        source = CountsSource(LoadMatrix(SOURCE.make(8, "grouped").loads.rows_MLGE), 4)
        with pytest.raises(ValueError, match="order: need one of"):
            source.make(8, "composed")


class TestStagesAndGroups:
    """Steps of planner.md, section 2: the slowest stage, and the slowest EP group."""

    def one(self, **values: object):
        chosen = settings(ep=(8,), strategies=("lpt", "relibra"), **values)
        return simulate(SOURCE, chosen, orders=("grouped",))[0]

    def test_stages_work_at_once(self) -> None:
        whole, halves = self.one(), self.one(pipeline_stages=2)
        for name, one in whole.results.items():
            staged = halves.results[name]
            assert staged.plan.hash == one.plan.hash
            before, after = (each.step_s[0.5, False, "max"] for each in (one, staged))
            assert before / 2 < after < before
            assert staged.planner_s <= staged.plan.planner_ms / 2e3
            assert one.move_s / 2 <= staged.move_s <= one.move_s

    def test_a_stage_holds_its_layers_only(self) -> None:
        whole, halves = self.one(), self.one(pipeline_stages=2)
        memory, half = (each.results["none"].memory for each in (whole, halves))
        assert half.expert_bytes == memory.expert_bytes / 2
        assert half.activation_bytes <= memory.activation_bytes  # two micro-batches in flight
        layers = len(MODELS["Qwen3-30B-A3B"].moe_layers)
        assert memory.expert_bytes == layers * 4 * 3 * 2048 * 768 * (2 + 4 + 12)

    def test_groups_share_layouts_and_the_slowest_counts(self) -> None:
        chosen = settings(ep=(8,), data_parallel=2)
        parts = SOURCE.make(16, "grouped").groups(2)
        both = SOURCE.make(16, "grouped").loads.rows_MLGE
        assert np.array_equal(np.concatenate([p.loads.rows_MLGE for p in parts], 2), both)
        assert all((p.pieces[:, 1] < 8).all() and (p.pieces[:, 1] >= 0).all() for p in parts)
        batch = simulate(SOURCE, chosen, orders=("grouped",))[0]
        steps = []
        for part in parts:
            plan = plan_step(
                {"train": part.loads},
                Topology(1, 8),
                model=MODELS["Qwen3-30B-A3B"].shape(2, 32),
                strategy="none",
            )
            steps.append(int(plan.passes["train"].slot_rows_MLGn.sum(3).max(2).sum()))
        slowest = batch.results["none"].plan.passes["train"].slot_rows_MLGn
        assert int(slowest.sum(3).max(2).sum()) == max(steps)
        assert batch.ratio("relibra", net=False) > 1.1

    def test_groups_of_a_trace_have_their_own_tokens(self) -> None:
        batch = TraceSource(trace(), sequences=8).make(8, "grouped")
        for index, part in enumerate(batch.groups(2)):
            assert part.loads.num_ranks == 4
            first = part.tokens.first_MG
            for m in range(len(first)):
                ids = part.tokens.ids_TLK[first[m, 0] : first[m, -1], 0]
                counted = np.bincount(ids.reshape(-1), minlength=16)
                assert np.array_equal(counted, part.loads.totals_MLE[m, 0]), index


def test_only_planning_time_is_random() -> None:
    """Equal arguments give equal seconds, planning apart."""
    runs = [simulate(SOURCE, settings(ep=(8,)), orders=("random",))[0] for _ in range(2)]
    for name in NAMES:
        one, two = (run.results[name] for run in runs)
        assert one.step_s[0.5, False, "max"] == two.step_s[0.5, False, "max"]
        assert one.plan.hash == two.plan.hash


def test_history_gets_the_batch_before() -> None:
    made = SOURCE.make(8, "grouped")
    assert made.previous is not None
    assert not np.array_equal(made.previous.rows_MLGE, made.loads.rows_MLGE)
    batch = simulate(SOURCE, settings(ep=(8,), strategies=("eplb",)), orders=("grouped",))[0]
    assert batch.left_out == {}
    names = tuple(batch.results)
    assert names == tuple(name for name in STRATEGIES if name in {*names})  # the planner's order
    without = simulate(
        TraceSource(trace(), sequences=4),
        settings(ep=(4,), strategies=("eplb",), model=MODELS["gpt-oss-20b"]),
    )[0]
    assert "eplb" in without.left_out
    assert "previous" in without.left_out["eplb"]


class TestTraces:
    def test_exact_copies_and_pieces(self) -> None:
        source = TraceSource(trace(), sequences=4)
        for order in source.orders:
            batch = source.make(8, order)
            assert batch.loads.rows_MLGE.sum() == trace().num_rows * 2 * 4
            assert batch.pieces[:, 2].sum() == trace().num_rows
            assert (batch.pieces[:, 3] > batch.pieces[:, 2]).all()  # sequences are cut in two
        simulated = simulate(source, settings(ep=(8,), model=MODELS["gpt-oss-20b"]))
        assert len(simulated) == 2

    def test_orders_share_sequences(self) -> None:
        source = TraceSource(trace(), sequences=4)
        grouped, shuffled = (source.make(4, order) for order in source.orders)
        same = grouped.loads.totals_MLE.sum(0) == shuffled.loads.totals_MLE.sum(0)
        assert same.all()
        assert not np.array_equal(grouped.loads.totals_MLE, shuffled.loads.totals_MLE)

    def test_repeat_scales_counts_and_seconds(self) -> None:
        one, many = (TraceSource(trace(), 4, repeat).make(4, "grouped") for repeat in (1, 5))
        assert np.array_equal(many.loads.rows_MLGE, 5 * one.loads.rows_MLGE)
        cost = settings(model=MODELS["gpt-oss-20b"]).cost(4, MODELS["gpt-oss-20b"].shape())
        np.testing.assert_allclose(many.dense_seconds(cost), 5 * one.dense_seconds(cost))
        with pytest.raises(PlanError, match="repeat: need at least 1, got 0"):
            TraceSource(trace(), 4, 0)
        with pytest.raises(PlanError, match="repeat: need counts below 2"):
            TraceSource(trace(), 4, 1 << 30).make(4, "grouped")

    def test_gptoss(self, shared_dir) -> None:
        from relibra.formats.trace_file import open_trace

        recorded = open_trace(shared_dir / "data" / "routing" / "gptoss20b_routing.npz", 32)
        source = TraceSource(recorded, sequences=8, repeat=16)
        batch = simulate(
            source,
            settings(ep=(8,), model=MODELS["gpt-oss-20b"]),
            orders=("grouped",),
        )[0]
        assert batch.results["none"].plan.report.imbalance_mean == pytest.approx(1.527, abs=2e-3)
        assert batch.ratio("relibra", net=False) > 1.2


class TestCounts:
    def test_one_order_one_size(self) -> None:
        source = CountsSource(LoadMatrix(SOURCE.make(8, "grouped").loads.rows_MLGE), 4)
        assert [batch.order for batch in simulate(source, settings(ep=(8,)))] == ["as given"]
        with pytest.raises(PlanError, match="ep: need 8 source ranks like the counts.*got 16"):
            simulate(source, settings(ep=(16,)))


class TestReroute:
    def plan(self, strategy: str = "relibra"):
        loads = {"train": LoadMatrix(SOURCE.make(8, "grouped").loads.rows_MLGE)}
        config = PlannerConfig(proposals=500, num_threads=1)
        return plan_step(
            loads, Topology(2, 4), model=ModelShape(32, 4, (0, 1)), config=config, strategy=strategy
        )

    @pytest.mark.parametrize("strategy", ["relibra", "eplb_oracle", "ideal"])
    @pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
    def test_rows_are_kept(self, strategy: str, share: float) -> None:
        plan = self.plan(strategy)
        rows, planned = reroute(plan, "train", share), executed_rows(plan, "train")
        assert np.array_equal(rows.sum((2, 3)), planned.sum((2, 3)))
        assert rows.min() >= 0
        assert share or np.array_equal(rows, planned)

    def test_everything_rerouted_ignores_replicas(self) -> None:
        plan = self.plan()
        rows = reroute(plan, "train", 1.0)
        homes = plan.layouts[0].slots_per_rank
        assert not rows[..., homes:].any()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ep": ()}, "ep: need numbers of ranks"),
        ({"ep": (12,)}, "ep: need a multiple of 8 ranks a node, got 12"),
        ({"strategies": ("magic",)}, "strategy: need one of none, .*'magic'"),
        ({"reroute": (120,)}, "reroute: need percentages 0..100, got 120"),
        ({"overlap": 2}, "overlap: need 0..1, got 2"),
        ({"pipeline_stages": 0}, "pipeline_stages: need .*0"),
        ({"data_parallel": 0.5}, "data_parallel: need .*0.5"),
        ({"cost_fields": {"block_rows": 0}}, "block_rows: need 1 to 1048576, got 0"),
    ],
)
def test_bad_input(values: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        settings(**values)


def test_topologies() -> None:
    assert settings().topology(4) == Topology(1, 4)
    assert str(settings(ranks_per_node=4).topology(16)) == "4 nodes x 4 ranks"
    nvl = SimulateSettings(MODELS["DeepSeek-V3"], HARDWARE["NVL72"], ep=(64, 72))
    assert nvl.topology(72).num_nodes == 1
