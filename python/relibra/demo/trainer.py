"""One rank of the demo: everything it holds, and one step from rollout to comparison.

Letters: B samples of this rank, n tokens of a sample, L MoE layers, K choices a token.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from relibra.demo.control import compare
from relibra.demo.inject import Fault, make_fault
from relibra.demo.model import build_language_model, replace_experts
from relibra.demo.records import StepLoads, StepRecord, Stopwatch
from relibra.demo.rollout import RolloutEngine
from relibra.demo.task import SortTask
from relibra.demo.train import PASS, Batch, Learner
from relibra.load_matrix import LoadMatrix
from relibra.module import BalancedMoE
from relibra.plan_config import PlannerConfig
from relibra.planner import plan_step
from relibra.runtime import Runtime
from relibra.shape import ModelShape
from relibra.topology import Topology

if TYPE_CHECKING:
    from relibra.demo.settings import DemoSettings
    from relibra.plan import StepPlan
    from relibra.trace import DispatchRows

_PROMPT_SEED, _SAMPLE_SEED = 1_000_003, 7_919


@dataclasses.dataclass(frozen=True)
class StepOutcome:
    """Everything that one step leaves behind on one rank.

    Attributes:
        record: Line of the table, equal on all ranks but for its times.
        loads: Rows of all ranks.
        ids_BrLK: uint8 ``[B, n-1, L, K]``, routing that this rank recorded.
    """

    record: StepRecord
    loads: StepLoads
    ids_BrLK: npt.NDArray[np.uint8]


class Trainer:
    """Rollout engine, balanced model and control of one rank.

    Args:
        settings: Sizes and hyper-parameters.
        group: All processes.
    """

    def __init__(self, settings: DemoSettings, group: dist.ProcessGroup) -> None:
        self._settings, self._task = settings, SortTask()
        self._rank = dist.get_rank(group)
        self._topology = Topology(settings.num_nodes, settings.ranks_per_node)
        self._shape = ModelShape(
            settings.num_experts,
            settings.top_k,
            range(settings.num_layers),
            settings.hidden_size,
            settings.expert_size,
            "float32",
        )
        self._config = PlannerConfig(
            replica_slots=settings.replica_slots, seed=settings.seed, num_threads=1
        )
        self._fault = make_fault(settings.inject)
        self._prompts = torch.Generator().manual_seed(settings.seed + _PROMPT_SEED)
        self._rollout = RolloutEngine(self._fresh_model(), self._task)
        self._balanced = self._make_learner(group, settings.replica_slots, self._fault)
        self._control = self._make_learner(group, 0, Fault())

    def _fresh_model(self) -> Any:
        torch.manual_seed(self._settings.seed)
        return build_language_model(self._settings, self._task)

    def _make_learner(self, group: dist.ProcessGroup, replica_slots: int, fault: Fault) -> Learner:
        settings = self._settings
        model = replace_experts(
            self._fresh_model(),
            lambda layer, w13, w2: BalancedMoE.from_dense(
                w13, w2, layer=layer, num_ranks=settings.num_ranks, rank=self._rank
            ),
        )
        optimizer = torch.optim.Adam(
            model.parameters(), lr=settings.learning_rate, eps=settings.adam_eps
        )
        runtime = Runtime(group, self._topology, replica_slots=replica_slots)
        runtime.attach(model, optimizer if fault.moves_moments else None, name="actor")
        fault.install(runtime, model)
        return Learner(model, runtime, optimizer, settings)

    def step(self, step: int) -> StepOutcome:
        """Roll out, plan, train, and compare with the control; collective."""
        watch, balanced, control = Stopwatch(), self._balanced, self._control
        with watch.time("export_s"):
            state = self._fault.export(balanced)
            self._fault.remember(state)
            self._rollout.refresh(state)
            control.runtime.load_logical_state_dict(control.model, state)
        with watch.time("rollout_s"):
            batch, reward = self._roll_out(step)
        with watch.time("plan_s"):
            rows = balanced.dispatch_rows(batch)
            plan, none = self._plan(rows)
        with watch.time("balanced_s"):
            outcome = balanced.gradients(batch, plan, rows)
        with watch.time("control_s"):
            control.gradients(batch, none, rows)
        with watch.time("compare_s"):
            gradient = compare(balanced, control, "grad")
            balanced.optimizer.step()
            control.optimizer.step()
            parameter = compare(balanced, control, "data")
            facts = self._reduce(reward, outcome.log_probs_Bc - batch.old_log_probs_Bc)
        loads = StepLoads(_rank_rows(none), _rank_rows(plan), self._topology)
        record = StepRecord(
            step=step,
            reward=facts[0],
            **loads.imbalances(),
            replicas=plan.report.replicas,
            moves=plan.report.moved_experts,
            cross_node_moves=plan.report.moved_experts_across_nodes,
            push_bytes=plan.report.push_bytes or 0,
            gradient_norm=outcome.gradient_norm,
            gradient_difference=gradient.relative,
            parameter_difference=parameter.largest,
            log_prob_difference=facts[1],
            times={**watch.seconds, "planner_ms": plan.planner_ms},
        )
        return StepOutcome(record, loads, batch.ids_BrLK.numpy().astype(np.uint8))

    def greedy_fraction(self) -> float:
        """Fraction of positions right on the held-out prompts, most likely tokens; collective."""
        self._rollout.refresh(self._fault.export(self._balanced))
        digits = self._task.held_out().tensor_split(self._settings.num_ranks)[self._rank]
        rollout = self._rollout.sample(digits, None)
        right = self._task.fraction_right(digits, self._completions(rollout.tokens_Bn))
        totals = torch.tensor([float(right.sum()), float(len(digits))], dtype=torch.float64)
        dist.all_reduce(totals)
        return float(totals[0] / totals[1])

    def _roll_out(self, step: int) -> tuple[Batch, torch.Tensor]:
        settings = self._settings
        drawn = self._task.draw(settings.num_prompts, self._prompts)
        mine = drawn.tensor_split(settings.num_ranks)[self._rank]
        digits = mine.repeat_interleave(settings.samples_per_prompt, dim=0)
        place = (settings.seed * _SAMPLE_SEED + step) * settings.num_ranks + self._rank
        rollout = self._rollout.sample(digits, torch.Generator().manual_seed(place))
        rewards_B = self._task.fraction_right(digits, self._completions(rollout.tokens_Bn))
        return Batch.of(rollout, rewards_B, settings), rewards_B.mean()

    def _completions(self, tokens_Bn: torch.Tensor) -> torch.Tensor:
        return tokens_Bn[:, self._task.prompt_length :]

    def _plan(self, rows: list[DispatchRows]) -> tuple[StepPlan, StepPlan]:
        """Plan the step, and the control's step, from the rows of all ranks; collective."""
        runtime = self._balanced.runtime
        loads = {PASS: runtime.gather_loads(LoadMatrix.from_rows(rows))}
        plan = plan_step(
            loads, self._topology, model=self._shape, layout=runtime.layout, config=self._config
        )
        alone = PlannerConfig(replica_slots=0, num_threads=1)
        none = plan_step(loads, self._topology, model=self._shape, config=alone, strategy="none")
        return plan, none

    def _reduce(self, reward: torch.Tensor, log_prob_gap: torch.Tensor) -> tuple[float, float]:
        # One collective for a mean and a maximum: each rank fills its own place.
        facts = torch.zeros(2, self._settings.num_ranks, dtype=torch.float64)
        facts[0, self._rank], facts[1, self._rank] = reward, log_prob_gap.abs().max()
        dist.all_reduce(facts)
        return float(facts[0].mean()), float(facts[1].max())


def _rank_rows(plan: StepPlan) -> npt.NDArray[np.int64]:
    rows_MLG: npt.NDArray[np.int64] = plan.passes[PASS].slot_rows_MLGn.sum(axis=-1)
    return rows_MLG
