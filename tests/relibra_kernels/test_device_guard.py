"""Launches run on the device of their tensors; no GPU is needed to see where they would go."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from relibra_kernels import ops
from relibra_kernels.ops import expert_wgrad, experts
from relibra_kernels.ops.device_guard import common_device, guarded

ZERO, ONE = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def current(monkeypatch):
    """Devices entered, the current one last."""
    stack = [0]

    @contextlib.contextmanager
    def device(where):
        stack.append(where.index)
        yield
        stack.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: stack[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    return stack


def where_it_runs(current, device):
    @guarded
    def body(x: torch.Tensor, slot_rows_n: torch.Tensor, flag: bool = True) -> int:
        assert flag
        return len(current), current[-1]

    with FakeTensorMode():
        x = torch.empty(2, device=device)
    return body(x, torch.zeros(2), flag=True)


def test_a_launch_switches_to_another_device_and_back(current):
    assert where_it_runs(current, ONE) == (2, 1)
    assert current == [0]


def test_on_the_current_device_nothing_is_switched(current):
    assert where_it_runs(current, ZERO) == (1, 0)


def test_an_error_inside_leaves_the_device(current, monkeypatch):
    monkeypatch.undo()
    entered = []

    class Device:
        def __init__(self, where):
            entered.append(where.index)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            entered.append("left")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", Device)

    def body(x):
        raise RuntimeError("inside")

    with FakeTensorMode():
        x = torch.empty(2, device=ONE)
    with pytest.raises(RuntimeError, match="inside"):
        guarded(body)(x)
    assert entered == [1, "left"]


def test_tensors_in_lists_count_and_host_tables_do_not():
    with FakeTensorMode():
        x, w = torch.empty(2, device=ONE), torch.empty(2, device=ZERO)
    names = ["x_UD", "slot_rows_n", "home_w13"]
    assert common_device(names, [x, torch.zeros(1), [x, x]]) == ONE
    message = "home_w13: need all tensors of an op on one device, that of x_UD, cuda:1, got cuda:0"
    with pytest.raises(ValueError, match=message):
        common_device(names, [x, torch.zeros(1), [x, w]])
    with pytest.raises(ValueError, match="that of x_UD, cuda:1, got cpu"):
        common_device(names, [x, None, [torch.zeros(1)]])


def tensors_of(op, first, others):
    """Arguments by the op's schema: the first tensor on one device, all others on another."""
    values, devices = [], iter([first])
    for argument in op._opoverload._schema.arguments:
        kind = str(argument.type)
        is_list = "List[" in kind
        if "Tensor" not in kind:
            values.append(argument.default_value if argument.has_default_value() else 1)
            continue
        device = "cpu" if argument.name == "slot_rows_n" else next(devices, others)
        one = torch.empty(4, 4, device=device)
        values.append([one] if is_list else one)
    return values


ONE_TENSOR = {"build_rows"}


@pytest.mark.parametrize(
    "name", [name for name in ops.GUARDED if name.split("::")[-1] not in ONE_TENSOR]
)
def test_every_op_that_launches_refuses_tensors_of_two_devices(name, current):
    op = next(
        value
        for module in vars(ops).values()
        for value in getattr(module, "__dict__", {}).values()
        if getattr(value, "_name", None) == name and hasattr(value, "_backend_fns")
    )
    with FakeTensorMode():
        arguments = tensors_of(op, ONE, ZERO)
        with pytest.raises(ValueError, match=r"one device, that of \w+, cuda:1, got cuda:0"):
            op._backend_fns["cuda"](*arguments)


def test_all_ops_with_a_triton_body_are_guarded():
    assert len(ops.GUARDED) == len(set(ops.GUARDED)) >= 15
    assert {experts.expert_up._name, expert_wgrad.expert_wgrad._name} <= set(ops.GUARDED)


def test_direct_ops_run_the_guarded_body_unless_a_mode_must_see_the_op():
    rows, index = torch.arange(6.0).reshape(3, 2), torch.tensor([[0, 2]], dtype=torch.int32)
    seen = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    plain = ops.direct_ops.combine(rows, index, None)
    with Log():
        logged = ops.direct_ops.combine(rows, index, None)
    assert torch.equal(plain, torch.tensor([[4.0, 6.0]]))
    assert torch.equal(logged, plain)
    assert "combine" in seen
    with pytest.raises(TypeError, match="rows_ND"):
        ops.direct_ops.combine(None, index, None)
