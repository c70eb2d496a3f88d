"""The law of tables of relative positions fails on attention that violates it."""

import torch

from attention_laws import check, tables
from specimens import assert_caught, each_law_of
from specimens.tables import RectangularWindow


@each_law_of(tables)
def test_the_law_fails_on_implementations_that_violate_it(
    name: str, device: torch.device
) -> None:
    assert_caught(name, device.type)


def test_the_order_of_rows_and_columns_counts_only_where_it_is_documented() -> None:
    class Undocumented(RectangularWindow):
        __doc__ = ""
        order = "xy"

    assert check(Undocumented, only="relative_table").passed
