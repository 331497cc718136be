"""What PyTorch keeps apart for every thread, carried to a thread that works for another one.

Autograd runs a node on one thread. Code of that node that goes on elsewhere (`transport.lockstep`)
would find another gradient mode there, another stream, and no graph. So it asks here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Carried(threading.local):
    state: ThreadState | None = None


_here = _Carried()


def graph_task_id() -> int:
    """Number of the backward that this thread works for, -1 outside any.

    Example:
        >>> graph_task_id()
        -1
    """
    if _here.state is not None:
        return _here.state.graph_task
    task: int = torch._C._current_graph_task_id()
    return task


def keeps_graph() -> bool:
    """Whether the backward that this thread works for keeps its graph; False outside any."""
    if _here.state is not None:
        return _here.state.keeps_graph
    if torch._C._current_graph_task_id() < 0:
        return False
    kept: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return kept


def has_saved_tensor_hooks() -> bool:
    """Whether hooks take what autograd saves, as inside an activation checkpoint."""
    if _here.state is not None:
        return _here.state.has_saved_tensor_hooks
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


@dataclasses.dataclass(frozen=True)
class ThreadState:
    """State of one thread at one time.

    Attributes:
        graph_task, keeps_graph, has_saved_tensor_hooks: see the functions of these names.
        grad_enabled, inference: gradient mode, inference mode.
        autocast: (device type, enabled, dtype, cache enabled) by device type.
        stream: current stream of the current CUDA device, None without CUDA.

    Example:
        >>> import threading
        >>> seen = []
        >>> def work(state):
        ...     with state.carried():
        ...         seen.append(torch.is_grad_enabled())
        >>> with torch.no_grad():
        ...     state = ThreadState.here()
        >>> thread = threading.Thread(target=work, args=(state,))
        >>> thread.start(), thread.join()
        (None, None)
        >>> seen
        [False]
    """

    graph_task: int
    keeps_graph: bool
    has_saved_tensor_hooks: bool
    grad_enabled: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype, bool], ...]
    stream: torch.cuda.Stream | None

    @classmethod
    def here(cls) -> ThreadState:
        """State of the calling thread."""
        has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        kinds = ("cpu", "cuda") if has_cuda else ("cpu",)
        return cls(
            graph_task_id(),
            keeps_graph(),
            has_saved_tensor_hooks(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple(
                (
                    kind,
                    torch.is_autocast_enabled(kind),
                    torch.get_autocast_dtype(kind),
                    torch.is_autocast_cache_enabled(),
                )
                for kind in kinds
            ),
            torch.cuda.current_stream() if has_cuda else None,
        )

    @contextlib.contextmanager
    def carried(self) -> Iterator[None]:
        """The calling thread works in this state inside the block."""
        before, _here.state = _here.state, self
        try:
            with contextlib.ExitStack() as stack:
                if self.stream is not None:
                    stack.enter_context(torch.cuda.stream(self.stream))  # and its device
                stack.enter_context(torch.inference_mode(self.inference))
                stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
                for kind, enabled, dtype, cached in self.autocast:
                    stack.enter_context(torch.autocast(kind, dtype, enabled, cached))
                yield
        finally:
            _here.state = before
