"""What kernels found wrong on the device ends the step with an error, before the optimizer."""

import contextlib
import re

import pytest
import torch
from moe_world import Model, World

import relibra
import relibra.use
from relibra_kernels.errors import PlanError
from relibra_kernels.ops.backend import error_word
from relibra_kernels.triton_ops.device_errors import MEANINGS


def test_an_error_bit_fails_the_step_and_is_told_once():
    world = World(1, 1, num_experts=4, top_k=2)
    runtime = relibra.Runtime(None, world.topology, replica_slots=1)
    runtime.attach(Model(world, 0, 1))
    plan = world.random_plan()
    bit, meaning = next(iter(MEANINGS.items()))
    wrong = pytest.raises((ValueError, PlanError), match=re.escape(meaning))
    with wrong, runtime.step(plan, {"train": world.routes(0)}):
        error_word(torch.zeros(1)).fill_(bit)
    with runtime.step(plan, {"train": world.routes(0)}):
        pass


def test_other_ids_on_a_device_fail_the_step_at_its_end(monkeypatch):
    monkeypatch.setattr(relibra.use, "checks_values", lambda tensor: False)  # as on CUDA
    world = World(1, 1, num_experts=4, top_k=2)
    runtime = relibra.Runtime(None, world.topology, replica_slots=1)
    model = Model(world, 0, 1)
    runtime.attach(model)
    x, scores, _ = world.batch(0, 0)
    ids = torch.from_numpy(world.ids(0, 0)).long()
    for wrong in (False, True):
        with contextlib.ExitStack() as stack:
            if wrong:
                ids[3, 0, 1] = (ids[3, 0, 1] + 1) % 4
                stack.enter_context(
                    pytest.raises((ValueError, PlanError), match="expert_ids: other")
                )
            step = stack.enter_context(
                runtime.step(world.random_plan(), {"train": world.routes(0)})
            )
            with step.forward(micro_batch=0), torch.no_grad():
                model(x, scores, ids)
