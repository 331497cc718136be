"""Triton kernels, one file an op, each with the thin wrapper that launches it.

Importable as ``relibra_kernels.triton_ops``. Wrappers check nothing: call the ops in
``torch.ops.relibra``, which validate their arguments and pick the implementation.
"""
