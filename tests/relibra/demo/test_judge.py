import dataclasses
import math

import pytest

from relibra.demo.judge import Check, judge_run, judge_step


def failed(checks):
    return [check.name for check in checks if not check.passed]


def test_a_healthy_step_passes(healthy):
    assert failed(judge_step(healthy)) == []


@pytest.mark.parametrize("bad", [2e-4, math.nan, math.inf])
@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("log_prob_difference", "rollout-log-probs"),
        ("gradient_difference", "gradient-vs-control"),
        ("parameter_difference", "parameters-vs-control"),
    ],
)
def test_each_step_check_catches_its_value(healthy, field, name, bad):
    assert failed(judge_step(dataclasses.replace(healthy, **{field: bad}))) == [name]


def test_a_healthy_full_run_passes(run_of):
    checks = judge_run(run_of(80), 0.9)
    assert failed(checks) == []
    assert len(checks) == 3 + 5 + 3


@pytest.mark.parametrize(
    ("changes", "greedy", "name"),
    [
        ({"rank_imbalance": 1.16}, 0.9, "rank-imbalance"),
        ({"rank_imbalance_none": 1.29}, 0.9, "rank-imbalance-without-balancing"),
        ({"node_imbalance": 1.05}, 0.9, "node-imbalance"),
        ({"replicas": 0}, 0.9, "share-of-steps-with-replicas"),
        ({"cross_node_moves": 0}, 0.9, "share-of-steps-with-cross-node-moves"),
        ({}, 0.6, "greedy-fraction-right-held-out"),
        ({}, math.nan, "greedy-fraction-right-held-out"),
        ({"gradient_difference": 1e-3}, 0.9, "gradient-vs-control"),
        ({"parameter_difference": math.nan}, 0.9, "parameters-vs-control"),
    ],
)
def test_each_run_check_catches_its_value(run_of, changes, greedy, name):
    assert failed(judge_run(run_of(80, **changes), greedy)) == [name]


def test_one_bad_step_of_many_is_found_and_named(run_of):
    records = run_of(80)
    records[33] = dataclasses.replace(records[33], parameter_difference=math.nan)
    (bad,) = [check for check in judge_run(records, 0.9) if not check.passed]
    assert (bad.name, bad.step) == ("parameters-vs-control", 33)
    assert str(bad) == "parameters-vs-control at step 33: nan, need <= 1e-06"


def test_reward_gates(run_of):
    flat = run_of(80, reward=0.65)
    assert failed(judge_run(flat, 0.9)) == ["reward-gain-over-first-10-steps"]
    low = [dataclasses.replace(record, reward=record.reward / 2) for record in run_of(80)]
    assert failed(judge_run(low, 0.9)) == ["reward-of-last-10-steps"]


def test_reward_is_not_judged_before_80_steps(run_of):
    assert failed(judge_run(run_of(79, reward=0.1), 0.0)) == []


def test_half_of_the_steps_with_moves_suffice(run_of):
    records = run_of(10)
    for step in range(5):
        records[step] = dataclasses.replace(records[step], cross_node_moves=0, replicas=0)
    assert failed(judge_run(records, 0.0)) == []
    records[5] = dataclasses.replace(records[5], cross_node_moves=0)
    assert failed(judge_run(records, 0.0)) == ["share-of-steps-with-cross-node-moves"]


def test_an_unknown_relation_is_refused():
    with pytest.raises(ValueError, match="relation: need one of"):
        Check("name", 1.0, "<", 2.0)


def test_a_check_goes_into_json_with_its_verdict():
    assert Check("name", 1.0, "<=", 2.0, 4).as_dict() == {
        "name": "name",
        "value": 1.0,
        "relation": "<=",
        "limit": 2.0,
        "step": 4,
        "passed": True,
    }
