"""The calling convention is inferred and reported."""

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from attention_laws import calling, infer
from attention_laws.adapter import Adapter, CallError, MaskArgument, Options
from attention_laws.calling import CallProbe, influence
from attention_laws.infer import infer_adapter, infer_inputs
from attention_laws.infer_build import infer_init_args
from attention_laws.script import find_output
from specimens.base import Correct, MaskedSelfAttention, SelfAttention
from specimens.batch import ImageBesideText
from specimens.gradients import PoolsByWeights
from specimens.order import MergesChunks, MergesChunksUnscaled


def call_probe(attention: Any, **options: Any) -> CallProbe:
    name = getattr(attention, "__name__", "mine")
    return CallProbe(Adapter(attention, name, "", {}), Options(**options))


def test_a_function_of_a_config_that_cannot_be_built_is_no_attention() -> None:
    def build(config: Any) -> nn.Module:
        return nn.MultiheadAttention(config.sizes[0], config.sizes[1])

    message = (
        "`build` requires `config`, whose meaning is unknown; give it with "
        "`--init-args config=...`, or check an instance: write `built = build(...)` in "
        "the file, and name `built`"
    )
    with pytest.raises(CallError, match=f"^{re.escape(message)}$"):
        infer_adapter(build, "build", "", Options())


def by_name(*, query: Tensor, key: Tensor, value: Tensor) -> None: ...
def reordered(value: Tensor, key: Tensor, query: Tensor) -> None: ...
def needs_a_mask(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> None: ...
def takes_one(hidden: Tensor, mask: Any = None) -> None: ...
def takes_any_keyword(**inputs: Tensor) -> None: ...
def takes_none() -> None: ...
def takes_args(*inputs: Tensor, context: Any = None) -> None: ...


@pytest.mark.parametrize(
    ("function", "inputs", "by_keyword", "call_args"),
    [
        (by_name, ("query", "key", "value"), True, {}),
        (reordered, ("query", "key", "value"), True, {}),
        (needs_a_mask, ("q", "k", "v"), False, {"attn_mask": None}),
        (takes_one, ("hidden",), False, {}),
        (takes_args, ("x",), False, {}),
        (
            nn.functional.scaled_dot_product_attention,
            ("query", "key", "value"),
            False,
            {},
        ),
    ],
)
def test_inputs_are_inferred_from_their_names(
    function: Any, inputs: tuple[str, ...], by_keyword: bool, call_args: dict[str, Any]
) -> None:
    probe = call_probe(function)
    infer_inputs(probe)
    assert probe.adapter.inputs == inputs
    assert probe.adapter.by_keyword == by_keyword
    assert probe.adapter.call_args == call_args


def test_inputs_in_kwargs_are_passed_by_keyword() -> None:
    probe = call_probe(takes_any_keyword, inputs=("query", "key", "value"))
    infer_inputs(probe)
    assert probe.adapter.by_keyword


def test_a_function_without_named_arguments_is_refused() -> None:
    message = (
        "`takes_none` has no named arguments; name its inputs with `--inputs x` or "
        "`--inputs query,key,value`"
    )
    with pytest.raises(CallError, match=f"^{re.escape(message)}$"):
        infer_inputs(call_probe(takes_none))


@pytest.mark.parametrize(
    ("result", "index"),
    [
        (torch.zeros(2, 5, 7), ""),
        ((torch.zeros(2, 3, 5, 5), torch.zeros(2, 5, 7)), "[1]"),
        ({"weights": None, "output": torch.zeros(2, 5, 7)}, "['output']"),
        (torch.zeros(2, 4, 7), None),
        ("nothing", None),
    ],
)
def test_the_output_has_the_shape_of_the_query(result: Any, index: str | None) -> None:
    adapter = Adapter(print, "print", "", {})
    assert find_output(result, torch.zeros(2, 5, 12), adapter) == index


def test_influence_is_how_far_the_output_moves() -> None:
    probe = call_probe(MaskedSelfAttention)
    infer_init_args(probe)
    infer_inputs(probe)
    call = probe.try_call()
    assert call is not None
    late, early = {"l": slice(3, None)}, {"l": slice(0, 3)}
    assert influence(*call, early, late) > 0.1
    assert influence(*call, late, early) == 0


def test_a_call_that_fails_is_none_and_its_error_is_stored() -> None:
    probe = call_probe(Correct)
    infer_init_args(probe)
    infer_inputs(probe)
    assert probe.try_call(mask=MaskArgument("mask", "attend", "bqk")) is not None
    assert probe.try_call(mask=MaskArgument("musk", "attend", "bqk")) is None
    assert probe.first_error.startswith("raises TypeError: ")
    assert "musk" in probe.first_error


def found(attention: Any, **options: Any) -> Adapter:
    name = getattr(attention, "__name__", "mine")
    return infer_adapter(attention, name, "", Options(**options))


def facts(adapter: Adapter) -> dict[str, str]:
    return {fact.name: f"{fact.value} ({fact.source})" for fact in adapter.facts}


def test_the_cpu_is_enough_to_infer_how_it_is_called() -> None:
    options = Options()
    # There is no such device here: every call on it would raise.
    object.__setattr__(options, "device", "cuda:99")
    adapter = infer_adapter(Correct, "Correct", "", options)
    assert adapter == infer_adapter(Correct, "Correct", "", Options())


class SequenceFirst(Correct):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:  # type: ignore[override]
        transposed = (x.transpose(0, 1) for x in (query, key, value))
        return super().forward(*transposed).transpose(0, 1)


class Unbatched(Correct):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        if x.dim() != 2:
            raise ValueError("one sequence at a time")
        return super().forward(x[None], x[None], x[None])[0]


class ChannelsLast(Correct):
    """An image, [batch_size, height, width, channels]."""

    def forward(self, image: Tensor) -> Any:  # type: ignore[override]
        _, height, width, _ = image.shape
        x = image.flatten(1, 2)
        return super().forward(x, x, x).unflatten(1, (height, width))


class Pooled(Correct):
    """Seven queries of its own."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.queries = nn.Parameter(torch.zeros(7, d_model))

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(self.queries.expand(len(x), -1, -1), x, x)


class OfItsOwnSize(Correct):
    """Its sizes are attributes of the config's class."""

    def __init__(self, config: "FixedConfig") -> None:
        super().__init__(config.hidden_size, config.heads)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x, x, x)


class FixedConfig:
    hidden_size, heads = 20, 5


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
        (Correct, "bld"),
        (SequenceFirst, "lbd"),
        (Unbatched, "ld"),
        (function, "bhld"),
        (lengths_first, "blhd"),
        (three_axes, "bld"),
        (ChannelsLast, "bld"),
        (Pooled, "bld"),
    ],
)
def test_the_layout_is_inferred_from_token_mixing(attention: Any, layout: str) -> None:
    assert found(attention).layout == layout


@pytest.mark.slow
def test_images_pooling_and_sizes_of_a_config_are_inferred() -> None:
    assert found(ChannelsLast).image == "image_channels_last"
    assert found(Pooled).is_pooled
    adapter = found(OfItsOwnSize)
    assert (adapter.heads, adapter.d_k, adapter.fixed_size) == (5, 4, True)


@pytest.mark.slow
def test_pixels_beside_the_tokens_of_a_text_are_an_image() -> None:
    adapter = found(ImageBesideText)
    assert (adapter.inputs, adapter.image) == (("image",), "image")


@pytest.mark.slow
def test_causality_is_inferred_or_stated() -> None:
    assert found(MaskedSelfAttention).causal
    assert (
        facts(found(MaskedSelfAttention))["causal without a mask"] == "yes (inferred)"
    )
    assert not found(Correct).causal
    assert not found(MaskedSelfAttention, causal=False).causal

    class CausalButNot(Correct):
        pass

    assert found(CausalButNot).causal  # by its name; the laws will show the leak


class FromDict(Correct):
    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        x = batch["tokens"]
        return {"y": super().forward(x, x, x)}


def test_an_input_in_a_dict_is_passed_by_its_key() -> None:
    adapter = found(FromDict)
    assert (adapter.input_key, adapter.output_index) == ("tokens", "['y']")


class LatentsAttend(Correct):
    def forward(self, x: Tensor, latents: Tensor) -> Tensor:  # type: ignore[override]
        both = torch.cat([x, latents], dim=1)
        return super().forward(latents, both, both)


def test_of_two_inputs_the_query_is_the_one_that_is_as_long_as_the_output() -> None:
    adapter = found(LatentsAttend)
    assert (adapter.inputs, adapter.by_keyword) == (("latents", "x"), True)
    assert adapter.cross_attention


class WithClassToken(Correct):
    def __init__(self, d_model: int, heads: int, num_patches: int = 4) -> None:
        super().__init__(d_model, heads)
        self.token = nn.Parameter(torch.zeros(1, 1, d_model))
        self.table = nn.Parameter(torch.zeros(1 + num_patches, d_model))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.table
        return super().forward(x, x, x)


def test_a_learned_token_before_the_others_is_left_out_of_the_output() -> None:
    adapter = found(WithClassToken)
    assert (adapter.fixed_length, adapter.output_index) == (4, "[:, 1:]")


class CountsAndWidths(Correct):
    def __init__(
        self, query_size: int, num_heads: int, num_seeds: int, item_num: int
    ) -> None:
        super().__init__(query_size, num_heads)
        self.seeds = nn.Parameter(torch.zeros(num_seeds, query_size))

    def forward(self, x: Tensor, head_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        y = super().forward(self.seeds.expand(len(x), -1, -1), x, x)
        return y if head_mask is None else y * head_mask.mean()


@pytest.mark.slow
def test_counts_and_widths_of_unknown_meaning_are_small_and_head_masks_no_masks() -> (
    None
):
    adapter = found(CountsAndWidths)
    assert facts(adapter)["built as"] == (
        "CountsAndWidths(query_size=12, num_heads=3, num_seeds=2, item_num=2) "
        "(inferred)"
    )
    assert adapter.is_pooled
    assert facts(adapter)["mask"] == "none (inferred)"


class MeanCore(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1, keepdim=True)


class WithCore(Correct):
    def __init__(self, core: nn.Module, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.core = core

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x) + self.core(x)


def test_a_part_that_is_required_is_one_of_its_file_of_this_name() -> None:
    assert facts(found(WithCore))["built as"] == (
        "WithCore(core=MeanCore(), d_model=12, heads=3) (inferred)"
    )


def test_key_and_value_may_be_given_as_one_argument() -> None:
    class Cross(Correct):
        def forward(self, x: Tensor, memory: Tensor) -> Any:  # type: ignore[override]
            return super().forward(x, memory, memory)

    assert found(Cross, inputs=("x", "memory", "memory")).inputs == ("x", "memory")


def test_a_window_with_which_nothing_is_built_is_not_inferred() -> None:
    class Halved(Correct):
        def __init__(self, d_model: int, heads: int, window: int = 4) -> None:
            super().__init__(d_model, heads)
            if window % 2:
                raise ValueError("window")
            self.side = window // 2

        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            near = torch.ones(1, x.shape[1], x.shape[1], dtype=torch.bool).tril()
            return super().forward(x, x, x, near.triu(-self.side))

    assert found(Halved).window is None


def test_a_dict_may_be_given_to_the_constructor() -> None:
    class FromConfig(Correct):
        def __init__(self, cfg: dict[str, int]) -> None:
            super().__init__(cfg["width"], cfg["heads"])

    cfg = {"width": 20, "heads": 5}
    adapter = found(FromConfig, init_args={"cfg": cfg}, d_model=20, heads=5)
    assert facts(adapter)["built as"] == f"FromConfig(cfg={cfg}) (given)"


class OfTwoWidths(Correct):
    def __init__(self, odim: int = 64, heads: int = 4, context_dim: int = 64) -> None:
        super().__init__(odim, heads)
        self.of_context = nn.Linear(context_dim, odim)

    def forward(self, x: Tensor, context: Tensor) -> Any:  # type: ignore[override]
        context = self.of_context(context)
        return super().forward(x, context, context)


class OfAnotherWidth(OfTwoWidths):
    def __init__(self, dim: int = 64, heads: int = 4, code: int = 64) -> None:
        super().__init__(dim, heads, code)


class OfHeadsOfAnyWidth(Correct):
    def __init__(self, dim: int, heads: int, dim_head: int) -> None:
        super().__init__(heads * dim_head, heads)
        self.first, self.last = nn.Linear(dim, 10), nn.Linear(heads * dim_head, dim)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        x = F.pad(self.first(x), (0, self.heads * 4 - 10))
        return self.last(super().forward(x, x, x))


@pytest.mark.parametrize(
    ("attention", "options", "is_free", "width"),
    [
        (OfTwoWidths, {}, False, None),  # built with three heads, and any other number
        (OfTwoWidths, {"d_model": 64, "heads": 4}, True, None),
        (OfTwoWidths, {"d_model": 64, "init_args": {"context_dim": 24}}, True, 24),
        (OfTwoWidths, {"d_model": 64, "init_args": {"context_dim": 64}}, True, None),
        (OfAnotherWidth, {"d_model": 64, "heads": 4}, False, None),
        (
            OfHeadsOfAnyWidth,
            {"d_model": 16, "init_args": {"dim": 16, "heads": 3, "dim_head": 4}},
            True,
            None,
        ),
    ],
)
def test_sizes_vary_only_where_a_call_with_others_succeeds(
    attention: Any, options: dict[str, Any], is_free: bool, width: int | None
) -> None:
    adapter = found(attention, **options)
    assert (adapter.free_heads, adapter.context_width) == (is_free, width)
    assert adapter.fixed_size == bool(options)


class OfSensors(SelfAttention):
    def __init__(self, n_sensors: int, n_heads: int) -> None:
        super().__init__(n_sensors, n_heads)


def test_a_width_that_is_given_under_an_unknown_name_is_that_of_a_layer() -> None:
    adapter = found(OfSensors, init_args={"n_sensors": 16, "n_heads": 2})
    seen = adapter.layout, adapter.fixed_length, adapter.heads, adapter.d_k
    assert seen == ("bld", None, 2, 8)


@pytest.mark.slow
def test_a_width_that_the_heads_do_not_divide_is_refused() -> None:
    message = r"`d_model` \(=7\) must be divisible by `heads` \(=2\)"
    with pytest.raises(CallError, match=message):
        found(Correct, d_model=7, heads=2)


class WithNetwork(SelfAttention):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.network = nn.Sequential(nn.Linear(d_model, d_model), nn.ReLU())

    def forward(self, x: Tensor) -> Any:
        return x + self.network(super().forward(x))


class WithNetworkAndCell(WithNetwork):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads)
        self.cell = nn.GRUCell(d_model, d_model)

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return self.cell(y.flatten(0, 1), x.flatten(0, 1)).view_as(x)


def test_a_relu_behind_a_softmax_is_no_feature_map() -> None:
    assert "features" not in found(WithNetwork).designs
    assert "features" in found(WithNetworkAndCell).designs


@pytest.mark.slow
def test_a_decorator_for_inference_is_a_design() -> None:
    class ForInference(Correct):
        forward = torch.no_grad()(Correct.forward)

    assert "inference" in found(ForInference).designs
    assert "inference" not in found(Correct).designs


def test_random_training_is_not_checked() -> None:
    class Noisy(Correct):
        def join(self, context: Tensor) -> Tensor:
            noise = torch.rand_like(context) if self.training else 0
            return super().join(context + noise)

    adapter = found(Noisy)
    assert not adapter.reproducible_training
    assert facts(adapter)["training"] == (
        "random even with dropout 0; only evaluation is checked (inferred)"
    )


def test_facts_say_whether_they_are_given_inferred_or_assumed() -> None:
    seen = facts(found(Correct, layout="batch_first", positions="learned", window=3))
    assert seen == {
        "built as": "Correct(d_model=12, heads=3) (inferred)",
        "inputs": "query, key, value (inferred)",
        "layout": "batch first (given)",
        "`mask`": "bool, True = may attend [batch items, queries, keys] (inferred)",
        "causal without a mask": "no (inferred)",
        "window": "3 (given)",
        "positions": "learned (given)",
    }


def test_an_attention_that_cannot_be_called_names_the_options() -> None:
    def stubborn(x: Tensor) -> Tensor:
        raise RuntimeError("no\nnever")

    message = (
        "`stubborn` could not be called with random inputs (batch size 2, length 5, 3 "
        "heads of width 4): it raises RuntimeError: no (test_infer.py:LINE); describe "
        "the call with `--layout`, `--inputs`, `--mask`, `--init-args`, `--call-args` "
        "or `--d-model`"
    ).replace("LINE", str(stubborn.__code__.co_firstlineno + 1))
    with pytest.raises(CallError, match=f"^{re.escape(message)}$"):
        found(stubborn)


def test_a_result_without_output_names_the_expected_shape() -> None:
    def busy(x: Tensor) -> int:
        return 3

    message = "it returns int, where a tensor of [2, 3, 5, 4] was expected; describe"
    with pytest.raises(CallError, match=re.escape(message)):
        found(busy)


def test_an_error_in_a_later_call_is_reported_as_state() -> None:
    seen: list[Tensor] = []

    def full(x: Tensor) -> Tensor:
        seen.append(x)
        if len(seen) > 2:
            raise RuntimeError("full")
        return x

    message = (
        f"the first calls of `full` succeed, and a later one raises RuntimeError: full "
        f"(test_infer.py:{full.__code__.co_firstlineno + 3}); does it store something "
        f"between calls?"
    )
    with pytest.raises(CallError, match=f"^{re.escape(message)}$"):
        found(full)


def test_a_pool_of_weighted_tokens_is_no_convolution() -> None:
    class PoolsPairs(PoolsByWeights):
        def forward(self, x: Tensor) -> Any:
            return super().forward(F.avg_pool1d(x.mT, 2, padding=1).mT)

    assert "convolution" not in found(PoolsByWeights).designs
    assert "convolution" in found(PoolsPairs).designs


def test_a_name_of_positions_is_no_excuse_where_tokens_are_a_set() -> None:
    for attention in (MergesChunks, MergesChunksUnscaled):
        assert "positions" not in found(attention).designs


class NeedsUnknown(nn.Module):
    """Takes arguments of which nothing is known, and counts how often it is called."""

    calls = 0

    def forward(self, x: Tensor, one: Tensor, other: Tensor) -> Tensor:
        NeedsUnknown.calls += 1
        raise ValueError("these are no such arguments")


def test_a_slow_machine_tries_the_same_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer, "CALLING_WORK", 1000)
    counts = []
    for step in (0.0, 0.05):
        clock = itertools.count(0, step)
        monkeypatch.setattr(calling.time, "process_time", lambda c=clock: next(c))
        NeedsUnknown.calls = 0
        with pytest.raises(CallError, match="these are no such arguments"):
            infer_adapter(NeedsUnknown(), "NeedsUnknown", "", Options())
        counts.append(NeedsUnknown.calls)
    assert counts[0] == counts[1] > 100


def test_calls_that_take_far_too_long_name_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = itertools.count(0, 1.0)
    monkeypatch.setattr(calling.time, "process_time", lambda: next(clock))
    message = "`NeedsUnknown` took more than 30 s; describe the call with `--layout`"
    with pytest.raises(CallError, match=message):
        infer_adapter(NeedsUnknown(), "NeedsUnknown", "", Options())


def test_the_number_of_calls_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer, "CALLING_WORK", 200)
    NeedsUnknown.calls = 0
    with pytest.raises(CallError, match="these are no such arguments"):
        infer_adapter(NeedsUnknown(), "NeedsUnknown", "", Options())
    assert NeedsUnknown.calls < 250
