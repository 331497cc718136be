"""Weak table from an integer to a live object: how an opaque op finds its transport at run time.

Ops take only tensors and numbers, so an object such as a transport reaches them as an id. The
table holds no reference: when the owner goes away, its id stops working. This is the only
module-level mutable state of the package.
"""

from __future__ import annotations

import itertools
import threading
import weakref

_objects: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
_next_id = itertools.count(1)
_lock = threading.Lock()


def register(owner: object) -> int:
    """Gives an object an id that ops can carry.

    Args:
        owner: the object; it stays alive only as long as somebody else holds it.

    Returns:
        A positive id, never used before in this process.

    Example:
        >>> class Transport: ...
        >>> transport = Transport()
        >>> lookup(register(transport)) is transport
        True
    """
    with _lock:
        new_id = next(_next_id)
        _objects[new_id] = owner
        return new_id


def lookup(object_id: int) -> object:
    """The object behind an id.

    Args:
        object_id: what `register` returned.

    Returns:
        The object.

    Raises:
        ValueError: the id was never given out in this process, or its object is gone.
    """
    with _lock:
        found = _objects.get(object_id)
    if found is None:
        raise ValueError(
            f"transport_id: need the id of a live object from relibra_kernels.registry.register, "
            f"got {object_id}"
        )
    return found
