"""Each shape of call is found out, and what was found is reported."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attention_laws.adapter import Adapter, CannotBeCalled, Mask, Options
from attention_laws.infer import (
    Inquiry,
    adapter,
    effect,
    find_heads,
    find_inputs,
    find_output,
    find_settings,
)
from specimens import Alone, Honest


def inquiry(attention: Any, **options: Any) -> Inquiry:
    name = getattr(attention, "__name__", "mine")
    return Inquiry(Adapter(attention, name, "", {}), Options(**options))


class Shaped(nn.Module):
    def __init__(
        self, embed_dim: int, num_heads: int, kv_heads: int = 1, bias: bool = True
    ) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("options", "built", "sizes"),
    [
        ({}, "Shaped(embed_dim=12, num_heads=3, kv_heads=3)", (3, 4, 1, False)),
        (
            {"settings": {"embed_dim": 20, "num_heads": 5, "bias": False}},
            "Shaped(embed_dim=20, num_heads=5, bias=False, kv_heads=5)",
            (5, 4, 1, True),
        ),
        ({"heads": 2}, "Shaped(embed_dim=8, num_heads=2, kv_heads=2)", (2, 4, 1, True)),
        (
            {"kv_heads": 2},
            "Shaped(embed_dim=16, num_heads=4, kv_heads=2)",
            (4, 4, 2, False),
        ),
        (
            {"d_model": 21},
            "Shaped(embed_dim=21, num_heads=3, kv_heads=3)",
            (3, 7, 1, True),
        ),
    ],
)
def test_a_class_is_built_as_its_arguments_are_called(
    options: dict[str, Any], built: str, sizes: tuple[int, int, int, bool]
) -> None:
    asked = inquiry(Shaped, **options)
    find_settings(asked)
    adapter = asked.adapter
    assert adapter.facts[0].name == "built as"
    assert adapter.facts[0].value == built
    assert (adapter.heads, adapter.d_k, adapter.groups, adapter.fixed) == sizes


def test_an_argument_that_nobody_knows_must_be_given() -> None:
    class Odd(nn.Module):
        def __init__(self, d_model: int, flavour: str) -> None:
            super().__init__()

    message = (
        "`Odd` wants `flavour`, and it is not known what that is; say it with "
        "`--with flavour=...`, or check a module that is built"
    )
    with pytest.raises(CannotBeCalled, match=f"^{re.escape(message)}$"):
        find_settings(inquiry(Odd))
    asked = inquiry(Odd, settings={"flavour": "sour"})
    find_settings(asked)
    assert asked.adapter.facts[0].value == "Odd(flavour='sour', d_model=4)"
    assert asked.adapter.heads == 1  # it has no argument for them


def test_a_module_says_how_many_heads_it_has() -> None:
    asked = inquiry(nn.MultiheadAttention(14, 7))
    find_heads(asked)
    assert (asked.adapter.heads, asked.adapter.fixed) == (7, True)
    asked = inquiry(torch.relu, kv_heads=2)
    find_heads(asked)
    assert (asked.adapter.heads, asked.adapter.groups) == (4, 2)
    assert not asked.adapter.fixed


def by_name(*, query: Tensor, key: Tensor, value: Tensor) -> None: ...
def turned(value: Tensor, key: Tensor, query: Tensor) -> None: ...
def needs_a_mask(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> None: ...
def takes_one(hidden: Tensor, mask: Any = None) -> None: ...
def takes_any_name(**inputs: Tensor) -> None: ...
def takes_none() -> None: ...


@pytest.mark.parametrize(
    ("function", "inputs", "keyword", "call"),
    [
        (by_name, ("query", "key", "value"), True, {}),
        (turned, ("query", "key", "value"), True, {}),
        (needs_a_mask, ("q", "k", "v"), False, {"attn_mask": None}),
        (takes_one, ("hidden",), False, {}),
        (
            nn.functional.scaled_dot_product_attention,
            ("query", "key", "value"),
            False,
            {},
        ),
    ],
)
def test_inputs_are_known_by_name(
    function: Any, inputs: tuple[str, ...], keyword: bool, call: dict[str, Any]
) -> None:
    asked = inquiry(function)
    find_inputs(asked)
    assert asked.adapter.inputs == inputs
    assert asked.adapter.keyword == keyword
    assert asked.adapter.call == call


def test_who_takes_any_name_is_called_by_name() -> None:
    asked = inquiry(takes_any_name, inputs=("query", "key", "value"))
    find_inputs(asked)
    assert asked.adapter.keyword


def test_who_takes_nothing_is_told_so() -> None:
    message = (
        "`takes_none` takes nothing; say which are its inputs with `--inputs x` or "
        "`--inputs query,key,value`"
    )
    with pytest.raises(CannotBeCalled, match=f"^{re.escape(message)}$"):
        find_inputs(inquiry(takes_none))


@pytest.mark.parametrize(
    ("result", "where"),
    [
        (torch.zeros(2, 5, 7), ""),
        ((torch.zeros(2, 3, 5, 5), torch.zeros(2, 5, 7)), "[1]"),
        ({"weights": None, "output": torch.zeros(2, 5, 7)}, "['output']"),
        (torch.zeros(2, 4, 7), None),
        ("nothing", None),
    ],
)
def test_the_output_has_the_shape_of_the_query(result: Any, where: str | None) -> None:
    assert find_output(result, torch.zeros(2, 5, 12)) == where


def test_an_effect_is_how_far_the_output_moves() -> None:
    asked = inquiry(Alone)
    find_settings(asked)
    find_inputs(asked)
    answered = asked.ask()
    assert answered is not None
    late, early = {"l": slice(3, None)}, {"l": slice(0, 3)}
    assert effect(*answered, early, late) > 0.1
    assert effect(*answered, late, early) == 0


def test_a_call_that_fails_is_no_answer() -> None:
    asked = inquiry(Honest)
    find_settings(asked)
    find_inputs(asked)
    assert asked.ask(way=Mask("mask", "keep", "bqk")) is not None
    assert asked.ask(way=Mask("musk", "keep", "bqk")) is None
    assert asked.problem.startswith("raises TypeError: ")
    assert "musk" in asked.problem


def found(attention: Any, **options: Any) -> Adapter:
    name = getattr(attention, "__name__", "mine")
    return adapter(attention, name, "", Options(**options))


def facts(adapter: Adapter) -> dict[str, str]:
    return {fact.name: f"{fact.value} ({fact.how})" for fact in adapter.facts}


class SequenceFirst(Honest):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:  # type: ignore[override]
        turned = (x.transpose(0, 1) for x in (query, key, value))
        return super().forward(*turned).transpose(0, 1)


class Unbatched(Honest):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        if x.dim() != 2:
            raise ValueError("one sequence at a time")
        return super().forward(x[None], x[None], x[None])[0]


def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(q, k, v)


def three_axes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.dim() != 3:
        raise ValueError("three axes")
    return function(q, k, v)


def lengths_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return function(q, k, v).transpose(1, 2)


@pytest.mark.parametrize(
    ("attention", "layout"),
    [
        (Honest, "bld"),
        (SequenceFirst, "lbd"),
        (Unbatched, "ld"),
        (function, "bhld"),
        (lengths_first, "blhd"),
        (three_axes, "bld"),
    ],
)
def test_the_layout_is_where_tokens_mix(attention: Any, layout: str) -> None:
    assert found(attention).layout == layout


def taking(name: str, kind: str, axes: str) -> type[Honest]:
    """An honest attention whose mask is of this kind and shape."""

    class Taking(Honest):
        def forward(self, x: Tensor, **masks: Tensor | None) -> Any:  # type: ignore[override]
            mask = masks.get(name)
            keep = None
            if mask is not None:
                keep = self.understand(mask, x)
            return super().forward(x, x, x, keep)

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
            mask = ~mask if kind == "hide" else mask
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
        return Taking.forward(self, x, **{name: mask})

    text = f"lambda self, x, {name}=None: forward(self, x, {name})"
    made = type("Made", (Taking,), {"forward": eval(text, {"forward": forward})})
    return made


@pytest.mark.parametrize("kind", ["keep", "hide", "additive"])
@pytest.mark.parametrize(
    "axes", ["b1qk", "bhqk", "bqk", "qkb", "nqk", "b11k", "bk", "qk"]
)
def test_a_mask_is_known_by_what_it_does(kind: str, axes: str) -> None:
    (mask,) = found(taking("attn_mask", kind, axes)).masks
    assert (mask.name, mask.kind, mask.axes) == ("attn_mask", kind, axes)


def test_lengths_are_known_by_their_name() -> None:
    masks = found(taking("valid_lens", "lengths", "")).masks
    assert [(m.kind, m.axes) for m in masks] == [("lengths", "bq"), ("lengths", "b")]


def test_a_flag_is_known_by_what_it_does() -> None:
    class Flagged(Honest):
        def forward(self, x: Tensor, is_causal: bool = False) -> Any:  # type: ignore[override]
            ones = torch.ones(1, x.shape[1], x.shape[1], dtype=torch.bool)
            return super().forward(x, x, x, ones.tril() if is_causal else None)

    (mask,) = found(Flagged).masks
    assert (mask.name, mask.kind) == ("is_causal", "flag")
    # torch's asks for a mask beside it, so it is none.
    names = {mask.name for mask in found(nn.MultiheadAttention).masks}
    assert names == {"attn_mask", "key_padding_mask"}


def test_a_mask_that_is_given_is_trusted() -> None:
    (mask,) = found(Honest, mask={"mask": "hide:bqk"}).masks
    assert (mask.kind, mask.axes) == ("hide", "bqk")
    (mask,) = found(Honest, mask={"mask": "hide"}).masks
    assert (mask.kind, mask.axes) == ("hide", "bqk")
    assert found(Honest, mask={"none": ""}).masks == ()


def test_a_mask_that_may_not_be_left_out_is_always_given() -> None:
    class Strict(Honest):
        def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
            return super().forward(x, x, x, mask & True)

    assert found(Strict).always is not None


def test_causal_is_seen_or_said() -> None:
    assert found(Alone).causal
    assert facts(found(Alone))["causal by itself"] == "yes (inferred)"
    assert not found(Honest).causal
    assert not found(Alone, causal=False).causal

    class CausalButNot(Honest):
        pass

    assert found(CausalButNot).causal  # it says so, and the laws will see


class Shows(Honest):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        self.attn = super().weigh(scores, mask)
        return self.attn

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:  # type: ignore[override]
        return super().forward(query, key, value), self.attn.mean(dim=1)


def test_weights_are_found_in_results_and_on_modules() -> None:
    adapter = found(Shows)
    assert (adapter.output, adapter.weights, adapter.weights_axes) == (
        "[0]",
        "[1]",
        "bqk",
    )
    adapter = found(Shows, weights=".attn")
    assert (adapter.weights, adapter.weights_axes) == (".attn", "bhqk")
    assert found(Shows, weights="none").weights == ""
    assert found(Honest).weights == ""


def test_training_that_stays_random_is_left_out() -> None:
    class Noisy(Honest):
        def join(self, context: Tensor) -> Tensor:
            noise = torch.rand_like(context) if self.training else 0
            return super().join(context + noise)

    adapter = found(Noisy)
    assert not adapter.trains
    assert facts(adapter)["training"] == (
        "still random with dropout 0; only evaluation is checked (inferred)"
    )


def test_what_was_found_and_what_was_given_is_told_apart() -> None:
    told = facts(found(Honest, layout="batch_first", positions="learned", window=3))
    assert told == {
        "built as": "Honest(d_model=12, heads=3) (inferred)",
        "inputs": "query, key, value (inferred)",
        "layout": "batch first (given)",
        "`mask`": "True = may be read [batch items, queries, keys] (inferred)",
        "causal by itself": "no (inferred)",
        "window": "3 (given)",
        "positions": "learned (given)",
    }


def test_who_cannot_be_called_is_told_which_options_help() -> None:
    def stubborn(x: Tensor) -> Tensor:
        raise RuntimeError("no\nnever")

    message = (
        "`stubborn` could not be called with small random inputs: it raises "
        "RuntimeError: no (test_infer.py:LINE); say how with `--layout`, `--inputs`, "
        "`--mask`, `--with`, `--call` or `--d-model`"
    ).replace("LINE", str(stubborn.__code__.co_firstlineno + 1))
    with pytest.raises(CannotBeCalled, match=f"^{re.escape(message)}$"):
        found(stubborn)


def test_who_answers_something_else_is_told_what_was_awaited() -> None:
    def busy(x: Tensor) -> int:
        return 3

    message = "it returns int, where a tensor of [2, 3, 5, 4] was awaited; say how"
    with pytest.raises(CannotBeCalled, match=re.escape(message)):
        found(busy)


def test_who_remembers_its_calls_is_asked_about_it() -> None:
    seen: list[Tensor] = []

    def full(x: Tensor) -> Tensor:
        seen.append(x)
        if len(seen) > 2:
            raise RuntimeError("full")
        return x

    message = (
        f"`full` answers first, then raises RuntimeError: full (test_infer.py:"
        f"{full.__code__.co_firstlineno + 3}); does it keep something from call to "
        f"call?"
    )
    with pytest.raises(CannotBeCalled, match=f"^{re.escape(message)}$"):
        found(full)
