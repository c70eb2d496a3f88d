"""The formula is tried with other numbers of heads and other orders of features."""

import torch
from torch import Tensor

from attention_laws import LAWS
from attention_laws.adapter import Options
from attention_laws.checker import check_law
from attention_laws.infer import infer_adapter
from specimens.base import SelfAttention


class MergesByFeature(SelfAttention):
    def join(self, context: Tensor) -> Tensor:
        joined: Tensor = self.out(context.permute(0, 2, 3, 1).flatten(2))
        return joined


class HidesItsHeads(SelfAttention):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.parts, self.heads = heads, torch.tensor(heads)  # type: ignore[assignment]

    def split(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], self.parts, -1).transpose(1, 2)


class OfTwoHeads(HidesItsHeads):
    def __init__(self, width: int) -> None:
        super().__init__(width, 2)


def test_the_formula_holds_for_other_orders_of_heads_and_features() -> None:
    hidden = HidesItsHeads(12, 3), OfTwoHeads
    for attention, heads in zip((MergesByFeature, *hidden), (3, 3, 2), strict=True):
        adapter = infer_adapter(attention, "attention", "", Options())
        assert adapter.heads == heads
        assert check_law(LAWS["formula"], adapter, Options(), False).status == "pass"
