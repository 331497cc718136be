import gc

import pytest

from relibra_kernels.registry import lookup, register


class Owner:
    pass


def test_ids_are_never_used_again_and_hold_nothing_alive():
    first = Owner()
    first_id = register(first)
    assert lookup(first_id) is first
    del first
    gc.collect()
    with pytest.raises(ValueError, match=f"transport_id: need the id of a live object.*{first_id}"):
        lookup(first_id)
    second = Owner()
    assert register(second) > first_id
