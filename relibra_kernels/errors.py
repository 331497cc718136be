"""Exceptions of ReLibra. `relibra` exports them again."""


class _Placed(Exception):
    """Says where in a routing payload something is; the attributes survive pickling."""

    def __init__(
        self,
        message: str,
        *,
        code: str = "",
        sample: int | None = None,
        layer: int | None = None,
        row: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.sample = sample
        self.layer = layer
        self.row = row

    def __reduce__(self) -> tuple[object, ...]:
        """Keeps the attributes when the error crosses a process boundary."""
        return (_rebuild, (type(self), str(self), self.code, self.sample, self.layer, self.row))


class TraceError(_Placed, ValueError):
    """A routing payload that cannot be used.

    Args:
        message: names the payload, what was needed and what was found.
        code: short name of the check that failed, such as `"layer_axis"`.
        sample: index of the sample, None when it concerns the whole payload.
        layer: decoder layer number, None when it concerns no single layer.
        row: row inside the sample, None when it concerns no single row.

    Example:
        >>> error = TraceError("top_k: need 8, got 9", code="top_k", sample=3)
        >>> error.code, error.sample, error.layer, str(error)
        ('top_k', 3, None, 'top_k: need 8, got 9')
    """


class TraceWarning(_Placed, UserWarning):
    """A routing payload that is usable but looks wrong; same attributes as `TraceError`.

    Example:
        >>> TraceWarning("rows 9 to 31 are equal", code="repeated_rows", row=9).row
        9
    """


class PlanError(ValueError):
    """Input from which no valid plan can be made, or a plan that breaks a rule.

    Example:
        >>> raise PlanError("replica_slots: need >= 0, got -1")
        Traceback (most recent call last):
        ...
        relibra_kernels.errors.PlanError: replica_slots: need >= 0, got -1
    """


class ReplicaSyncError(RuntimeError):
    """Moving weights or gradients between ranks failed; names the operation, use and peer.

    Args:
        message: as above.
        details: facts as an object, such as a `relibra_kernels.transport.sync_report.SyncFailure`;
            None where the message says all.

    Example:
        >>> issubclass(ReplicaSyncError, RuntimeError)
        True
    """

    def __init__(self, message: str = "", details: object = None) -> None:
        super().__init__(message)
        self.details = details

    def __reduce__(self) -> tuple[object, ...]:
        """Keeps the facts when the error crosses a process boundary."""
        return (type(self), (str(self), self.details))


def _rebuild(
    cls: type[_Placed],
    message: str,
    code: str,
    sample: int | None,
    layer: int | None,
    row: int | None,
) -> _Placed:
    return cls(message, code=code, sample=sample, layer=layer, row=row)
