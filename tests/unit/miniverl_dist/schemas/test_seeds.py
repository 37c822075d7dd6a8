from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.schemas.seeds import derive_seed

Parts = st.lists(st.integers() | st.text("abc", min_size=1), max_size=4)


def test_it_is_the_same_on_every_machine() -> None:
    assert derive_seed(0, "turn", 3) == 4155383478169954479
    assert derive_seed() == 8203414616412130826


@settings(deadline=None)
@given(Parts, Parts)
def test_other_parts_make_another_63_bit_seed(
    left: list[int | str], right: list[int | str]
) -> None:
    assert 0 <= derive_seed(*left) < 2**63
    assert (derive_seed(*left) == derive_seed(*right)) == (
        [str(part) for part in left] == [str(part) for part in right] or left == right
    )


def test_neither_glue_nor_order_is_lost() -> None:
    seeds = [(1, 23), (12, 3), (3, 12), (1, 2, 3), (123,), ("12", 3, "")]
    assert len({derive_seed(*parts) for parts in seeds}) == len(seeds)
