"""Which body an op runs, and what happens to values that only a device sync could check.

On CUDA no op reads a value on the host: wrong ids and rows take no part and set a bit in the
device's error word, which `raise_device_errors` reads. In debug mode every call is checked.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from typing import TYPE_CHECKING, TypeVar

import torch

from relibra_kernels.checks import check_choice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BACKENDS = ("auto", "triton", "reference")

Result = TypeVar("Result")
_debug = contextvars.ContextVar("debug", default=False)


def use_triton(backend: str, tensor: torch.Tensor) -> bool:
    """Whether an op runs its Triton body.

    Args:
        backend: "auto" (Triton on CUDA, else the reference), "triton" or "reference".
        tensor: any of the op's tensors; its device decides.

    Returns:
        True for the Triton body.

    Raises:
        ValueError: another name.
        RuntimeError: "triton" for CPU tensors outside of Triton's interpreter.

    Example:
        >>> use_triton("auto", torch.zeros(1)), use_triton("reference", torch.zeros(1))
        (False, False)
    """
    check_choice("backend", backend, BACKENDS)
    if backend == "triton" and not tensor.is_cuda and not _is_interpreter():
        raise RuntimeError(
            "backend: need CUDA tensors for 'triton', or Triton's interpreter, got a tensor on "
            f"{tensor.device}; set TRITON_INTERPRET=1 before Triton is imported, or use 'auto'"
        )
    return backend == "triton" or (backend == "auto" and tensor.is_cuda)


def _is_interpreter() -> bool:
    from triton.runtime.interpreter import InterpretedFunction

    from relibra_kernels.triton_ops.device_errors import report

    return isinstance(report, InterpretedFunction)


def on_cpu(body: Callable[..., Result], *arguments: object) -> Result:
    """Runs a body that is made of NumPy; tensors go to the CPU, results come back to the device."""
    devices = [one.device for one in arguments if isinstance(one, torch.Tensor)]
    if all(device.type == "cpu" for device in devices):
        return body(*arguments)
    there = [one.cpu() if isinstance(one, torch.Tensor) else one for one in arguments]
    result = body(*there)
    if isinstance(result, torch.Tensor):
        return result.to(devices[0])  # type: ignore[return-value]
    return tuple(one.to(devices[0]) for one in result)  # type: ignore[attr-defined,return-value]


@contextlib.contextmanager
def debug() -> Iterator[None]:
    """Checks values on CUDA too, at the price of a device sync in every op.

    Example:
        >>> with debug():
        ...     checks_values(torch.zeros(1))
        True
    """
    token = _debug.set(True)
    try:
        yield
    finally:
        _debug.reset(token)


def checks_values(tensor: torch.Tensor) -> bool:
    """Whether an op may look at the values of its tensors: on the CPU, or in debug mode."""
    return tensor.is_cpu or _debug.get()


@functools.cache
def _error_word(device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # every mode writes there
        return torch.zeros(1, dtype=torch.int32, device=device)


def error_word(tensor: torch.Tensor) -> torch.Tensor:
    """The int32 ``[1]`` word of the tensor's device to which kernels add error bits."""
    return _error_word(tensor.device)


def note_other_ids(different: torch.Tensor) -> None:
    """Sets the bit for ids that differ from the replayed ones, without a device sync.

    Args:
        different: bool, any shape; nothing is noted if none is True.

    Example:
        >>> note_other_ids(torch.tensor([False, False]))
        >>> raise_device_errors("cpu")
    """
    from relibra_kernels.triton_ops.device_errors import OTHER_IDS

    error_word(different).bitwise_or_(different.any().to(torch.int32) * OTHER_IDS)


def with_error_word(
    kernel: Callable[..., Result], reference: Callable[..., Result], *arguments: object
) -> Result:
    """Runs a Triton body that reports to the error word of its first argument's device.

    Args:
        kernel: takes the arguments and the word.
        reference: the same op in NumPy; on the CPU and in debug mode it names the place of what
            the kernel found.
        arguments: of both, a tensor first.
    """
    tensor = arguments[0]
    assert isinstance(tensor, torch.Tensor)
    result = kernel(*arguments, error_word(tensor))
    if checks_values(tensor) and int(error_word(tensor).item()):
        bits = int(error_word(tensor).item())
        error_word(tensor).zero_()
        on_cpu(reference, *arguments)  # raises
        error_word(tensor).fill_(bits)  # or finds nothing: an earlier op's mistake
        raise_device_errors(tensor.device)
    return result


def raise_device_errors(device: torch.device | str) -> None:
    """Raises what kernels on a device found wrong since the last call; a device sync.

    Args:
        device: the device.

    Raises:
        ValueError: a kernel left out a wrong value; every kind of mistake that was found.

    Example:
        >>> raise_device_errors("cpu")
    """
    word = _error_word(torch.empty(0, device=device).device)
    bits = int(word.item())
    if bits:
        from relibra_kernels.triton_ops.device_errors import MEANINGS

        word.zero_()
        found = "; ".join(text for bit, text in MEANINGS.items() if bits & bit)
        raise ValueError(f"{found} (found on {word.device}; `debug` names the place)")
