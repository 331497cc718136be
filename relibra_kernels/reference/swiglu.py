"""The gated activation between the two GEMMs of an expert."""

from __future__ import annotations

import torch

from relibra_kernels.reference.combine import accumulation_dtype

# Written with exp and division: torch's own sigmoid and silu give other bits for the last elements
# of a tensor than for the rest, so that a row's result would depend on its place.


def swiglu(h_R2F: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` with ``h = gate | up`` concatenated; fp32 inside, one rounding.

    Args:
        h_R2F: ``[R, 2F]``, any float dtype.

    Returns:
        ``[R, F]`` in the dtype of ``h``. Differentiable once.

    Raises:
        TypeError, ValueError: not a float matrix with an even number of columns.

    Example:
        >>> import relibra_kernels
        >>> torch.ops.relibra.swiglu(torch.tensor([[0.0, 100.0, 5.0, 3.0]])).tolist()
        [[0.0, 300.0]]
    """
    gate, up = h_R2F.to(accumulation_dtype(h_R2F.dtype)).chunk(2, dim=1)
    return (gate / (1 + torch.exp(-gate)) * up).to(h_R2F.dtype)


def swiglu_backward(da_RF: torch.Tensor, h_R2F: torch.Tensor) -> torch.Tensor:
    """Gradient of `swiglu`.

    Derived: with ``s = sigmoid(gate)``, ``dgate = da * up * s * (1 + gate * (1 - s))`` and
    ``dup = da * gate * s``.

    Args:
        da_RF: ``[R, F]``, dtype of ``h``; other references also give it in the accumulation dtype.
        h_R2F: ``[R, 2F]``, as given to `swiglu`.

    Returns:
        ``[R, 2F]`` in the dtype of ``h``; fp32 inside, one rounding.

    Raises:
        TypeError, ValueError: shapes or dtypes that do not fit.

    Example:
        >>> import relibra_kernels
        >>> torch.ops.relibra.swiglu_backward(
        ...     torch.tensor([[1.0]]), torch.tensor([[0.0, 4.0]])).tolist()
        [[2.0, 0.0]]
    """
    wide = accumulation_dtype(h_R2F.dtype)
    gate, up = h_R2F.to(wide).chunk(2, dim=1)
    da = da_RF.to(wide)
    d_gate = torch.ops.aten.silu_backward(da * up, gate)
    d_up = da * torch.nn.functional.silu(gate)
    return torch.cat([d_gate, d_up], 1).to(h_R2F.dtype)
