"""Masks are inferred from their effect, whatever they are called."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attention_laws import check
from attention_laws.adapter import Adapter, Options
from attention_laws.infer import infer_adapter
from specimens.base import Correct, Guided, SelfAttention


def found(attention: Any, **options: Any) -> Adapter:
    return infer_adapter(attention, "mine", "", Options(**options))


def attention_with_mask(name: str, kind: str, axes: str) -> type[Correct]:
    """An honest attention whose mask is of this kind and shape."""

    class TakesMask(Correct):
        def forward(self, x: Tensor, **masks: Tensor | None) -> Any:  # type: ignore[override]
            mask = masks.get(name)
            allowed = None
            if mask is not None:
                allowed = self.understand(mask, x)
            return super().forward(x, x, x, allowed)

        def understand(self, mask: Tensor, x: Tensor) -> Tensor:
            batch_size, length = x.shape[:2]
            if kind == "lengths":
                order = torch.arange(length)
                lengths = mask.view(batch_size, -1, 1)
                return (order < lengths).expand(-1, length, -1)
            if kind == "additive":
                if mask.dtype == torch.bool:
                    raise TypeError("additive")
                mask = mask == 0
            if mask.dtype != torch.bool:
                raise TypeError("bool")
            size = {"b": batch_size, "q": length, "k": length, "1": 1}
            size |= {"h": self.heads, "n": batch_size * self.heads}
            if list(mask.shape) != [size[axis] for axis in axes]:
                raise ValueError("shape")
            mask = ~mask if kind == "ignore" else mask
            if axes == "nqk":
                mask = mask.view(batch_size, self.heads, length, length)[:, 0]
            if axes == "bhqk":
                mask = mask[:, 0]
            if axes == "qkb":
                mask = mask.permute(2, 0, 1)
            if axes == "qk":
                mask = mask.expand(batch_size, -1, -1)
            if axes == "bk":
                mask = mask[:, None].expand(-1, length, -1)
            if axes in ("b1qk", "b11k"):
                mask = mask[:, 0].expand(-1, length, -1)
            return mask

    # A signature with the name in it.
    def forward(self: Any, x: Tensor, mask: Any = None) -> Any:
        return TakesMask.forward(self, x, **{name: mask})

    text = f"lambda self, x, {name}=None: forward(self, x, {name})"
    made = type("Made", (TakesMask,), {"forward": eval(text, {"forward": forward})})
    return made


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["attend", "ignore", "additive"])
@pytest.mark.parametrize(
    "axes", ["b1qk", "bhqk", "bqk", "qkb", "nqk", "b11k", "bk", "qk"]
)
def test_the_kind_and_axes_of_a_mask_are_inferred_from_its_effect(
    kind: str, axes: str
) -> None:
    (mask,) = found(attention_with_mask("attn_mask", kind, axes)).masks
    assert (mask.name, mask.kind, mask.axes) == ("attn_mask", kind, axes)


def test_lengths_are_inferred_from_their_name() -> None:
    masks = found(attention_with_mask("valid_lens", "lengths", "")).masks
    assert [(m.kind, m.axes) for m in masks] == [("lengths", "bq"), ("lengths", "b")]


def test_a_mask_of_the_first_item_is_found_although_it_hides_nothing_elsewhere() -> (
    None
):
    class FirstLength(Correct):
        def forward(self, x: Tensor, valid_lens: Tensor | None = None) -> Any:  # type: ignore[override]
            mask = None
            if valid_lens is not None:
                order = torch.arange(x.shape[1])
                mask = (order < valid_lens[0].view(-1, 1)).expand(
                    len(x), x.shape[1], -1
                )
            return super().forward(x, x, x, mask)

    masks = found(FirstLength).masks
    assert [(m.name, m.kind) for m in masks] == [("valid_lens", "lengths")]


@pytest.mark.slow
def test_a_causal_flag_is_inferred_from_its_effect() -> None:
    class Flagged(Correct):
        def forward(self, x: Tensor, is_causal: bool = False) -> Any:  # type: ignore[override]
            ones = torch.ones(1, x.shape[1], x.shape[1], dtype=torch.bool)
            return super().forward(x, x, x, ones.tril() if is_causal else None)

    (mask,) = found(Flagged).masks
    assert (mask.name, mask.kind) == ("is_causal", "causal")
    # The flag of torch requires a mask, too: alone it raises, and is not used.
    names = {mask.name for mask in found(nn.MultiheadAttention).masks}
    assert names == {"attn_mask", "key_padding_mask"}


@pytest.mark.slow
def test_a_stated_mask_encoding_is_used() -> None:
    (mask,) = found(Correct, mask={"mask": "ignore:bqk"}).masks
    assert (mask.kind, mask.axes) == ("ignore", "bqk")
    (mask,) = found(Correct, mask={"mask": "ignore"}).masks
    assert (mask.kind, mask.axes) == ("ignore", "bqk")
    assert found(Correct, mask={"none": ""}).masks == ()


@pytest.mark.slow
def test_a_required_mask_is_passed_in_every_call() -> None:
    class Strict(Correct):
        def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
            return super().forward(x, x, x, mask & True)

    assert found(Strict).required_mask is not None
    assert found(Strict).masks


def test_a_mask_with_too_many_axes_is_not_inferred() -> None:
    # Its mask is [q_len, k_len]; one of four axes broadcasts, and so do the weights.
    class AddsTwoAxes(Correct):
        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
        ) -> Any:
            output = super().forward(query, key, value, mask)
            return output, self.weights.mean(dim=1)

        def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
            if mask is not None:
                least = torch.finfo(scores.dtype).min
                scores = scores.masked_fill(~mask[None, None], least)
            self.weights = scores.softmax(dim=-1)
            return self.weights.reshape(-1, self.heads, *scores.shape[-2:])

    assert [mask.axes for mask in found(AddsTwoAxes).masks] == ["qk"]


def test_a_mask_that_makes_the_output_larger_is_not_inferred() -> None:
    # One of two axes makes the weights those of more items, which become features.
    class OfItems(SelfAttention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
            self.mask = mask
            return super().forward(x).reshape(*x.shape[:2], -1)

        def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
            if self.mask is not None:
                hidden = ~self.mask[:, None, None]
                scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
            return scores.softmax(dim=-1)

        def join(self, context: Tensor) -> Tensor:
            return context.transpose(-3, -2)

    assert [mask.axes for mask in found(OfItems).masks] == ["bk"]


def test_a_mask_of_each_item_is_tried_although_one_of_all_items_is_right() -> None:
    class RepeatsInWrongOrder(Correct):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
            return super().forward(x, x, x, mask)

        def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
            if mask is not None:
                if mask.dim() > 3:
                    raise ValueError("mask")
                if mask.dim() == 3:
                    mask = mask.repeat(self.heads, 1, 1).view(scores.shape)
                scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
            return scores.softmax(dim=-1)

    assert {mask.axes for mask in found(RepeatsInWrongOrder).masks} == {"qk", "bqk"}


@pytest.mark.slow
def test_of_two_required_masks_that_of_the_other_input_hides_nothing() -> None:
    adapter = found(Guided)
    assert adapter.inputs == ("x",)
    assert [(m.name, m.kind) for m in adapter.masks] == [("x_mask", "ignore")]
    adapter = found(Guided, inputs=("x", "y"))
    assert [(m.name, m.kind) for m in adapter.masks] == [("y_mask", "ignore")]


class RequiresZeros(Correct):
    """A mask of items and keys, or of queries, too, of any type: 0 hides a key."""

    def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
        rows = x.shape[1] if mask.dim() == 3 else 1
        allowed = (mask != 0).view(len(x), rows, -1).expand(-1, x.shape[1], -1)
        return super().forward(x, x, x, allowed)


def test_a_required_mask_of_zeros_is_not_added_to_the_scores() -> None:
    assert [mask.kind for mask in found(RequiresZeros).masks] == ["attend"]


class OverwritesPadding(Correct):
    """The mask of a window takes the place of that of the padding."""

    def forward(  # type: ignore[override]
        self, x: Tensor, src_key_padding_mask: Tensor | None = None
    ) -> Any:
        place = torch.arange(x.shape[1])
        allowed = torch.ones(len(x), 1, x.shape[1], dtype=torch.bool)
        if src_key_padding_mask is not None:
            allowed = allowed & ~src_key_padding_mask[:, None]
        allowed = self.combine(allowed, (place - place[:, None]).abs() <= 4)
        return super().forward(x, x, x, allowed)

    def combine(self, allowed: Tensor, near: Tensor) -> Tensor:
        return near[None]


class CombinesPadding(OverwritesPadding):
    def combine(self, allowed: Tensor, near: Tensor) -> Tensor:
        return allowed & near


@pytest.mark.slow
def test_padding_that_a_key_padding_mask_does_not_hide_is_reported() -> None:
    (mask,) = found(OverwritesPadding).masks
    assert (mask.kind, mask.axes) == ("ignore", "bk")
    report = check(OverwritesPadding, only="padding")
    assert [result.law.name for result in report.failed] == ["padding"], report
    report = check(CombinesPadding, only="padding")
    assert [result.law.name for result in report.passed] == ["padding"], report


class CountsOneTooMany(Correct):
    """The first token of the padding is visible."""

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Any:  # type: ignore[override]
        if lengths is None:
            return super().forward(x, x, x)
        visible = torch.arange(x.shape[1]) <= lengths[:, None]
        return super().forward(x, x, x, visible[:, None])


@pytest.mark.slow
def test_lengths_that_hide_one_key_too_few_are_lengths() -> None:
    (mask,) = found(CountsOneTooMany).masks
    assert mask.kind == "lengths"
    report = check(CountsOneTooMany, only="padding")
    assert [result.law.name for result in report.failed] == ["padding"], report


class OneQueryApart(Correct):
    """Several queries take what PyTorch's kernel does, one query only a bool mask."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Any:
        if query.shape[1] == 1:
            allowed = None if mask is None else ~~mask[:, None]
            return super().forward(query, key, value, allowed)
        layers = (self.query, query), (self.key, key), (self.value, value)
        q, k, v = (self.split(layer(x)) for layer, x in layers)
        given = None if mask is None else mask[:, None, None]
        return self.join(nn.functional.scaled_dot_product_attention(q, k, v, given))


@pytest.mark.slow
def test_an_encoding_that_one_query_does_not_take_is_none_of_the_mask() -> None:
    assert [mask.kind for mask in found(OneQueryApart).masks] == ["attend"]
