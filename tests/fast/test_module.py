"""The fast module has the results of the core, and works wherever a module must."""

import copy
import gc
import io
import itertools
import math
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attention_laws import check
from calls import shrink
from contract import Fast, Sizes
from headnotes import fast, masks, mha
from headnotes.fast import KeyValueCache, blockwise, formula

# Prime and pairwise distinct, so that no swapped pair of axes can pass unseen.
Q_LEN, K_LEN, BATCH, HEADS, D_K = 13, 17, 5, 11, 3
D_MODEL = HEADS * D_K

# PyTorch's kernel has no rule for `vmap`, and says that it takes one item at a time.
SLOW = "ignore:There is a performance drop:UserWarning"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sizes reach every method: tiles have 4 rows, and 8 of 11 heads."""
    shrink(monkeypatch, rows=4)


def build(
    kind: type[nn.Module] = fast.MultiHeadAttention,
    dropout_prob: float = 0.0,
    **settings: Any,
) -> Any:
    """A module whose rows of attention differ: weights well above the usual scale."""
    module = kind(HEADS, D_MODEL, dropout_prob, **settings)  # type: ignore[call-arg]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) / D_MODEL**0.4)
    return module


def pair(dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[Any, Any]:
    """The core and the fast one, with the same weights."""
    module = build(**settings).to(dtype)
    core = build(mha.MultiHeadAttention, **settings).to(dtype)
    core.load_state_dict(module.state_dict())
    return core, module


def inputs(
    q_len: int = Q_LEN, k_len: int = K_LEN, batch_size: int = BATCH, **like: Any
) -> dict[str, Tensor]:
    """Random query, key and value, as `forward` takes them."""
    sizes = Sizes(q_len, k_len, batch_size, HEADS, D_K)
    return Fast(fast.MultiHeadAttention).inputs(sizes, **like)


def self_inputs(
    seq_len: int = Q_LEN, batch_size: int = BATCH, **like: Any
) -> dict[str, Any]:
    """One tensor as query, key and value: self-attention."""
    x = torch.randn(seq_len, batch_size, D_MODEL, **like)
    return {"query": x, "key": x, "value": x}


def some_mask(
    q_len: int = Q_LEN, k_len: int = K_LEN, batch_size: int = BATCH
) -> Tensor:
    """A random mask; every fifth of its rows is fully masked."""
    mask = torch.rand(q_len, k_len, batch_size) < 0.6
    mask[::5] = False
    return mask


def with_causality(mask: Tensor | None, is_causal: bool, q_len: int, k_len: int) -> Any:
    """The mask for the core, which has no `is_causal`."""
    if not is_causal:
        return mask
    past = torch.ones(q_len, k_len).bool().tril(k_len - q_len).unsqueeze(-1)
    return past if mask is None else past & mask.bool()


# The same results as the core


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance", "scores"),
    [(torch.float64, 1e-12, 1), (torch.float32, 3e-6, 2 * HEADS * 4 * K_LEN)],
    ids=str,
)
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize(
    ("q_len", "k_len"), [(13, 17), (17, 13), (13, 13), (17, 17), (7, 7)]
)
def test_outputs_weights_and_gradients_are_those_of_the_core(
    monkeypatch: pytest.MonkeyPatch,
    q_len: int,
    k_len: int,
    is_causal: bool,
    dtype: torch.dtype,
    tolerance: float,
    scores: int,
) -> None:
    monkeypatch.setattr(blockwise, "TILE_SCORES", scores)
    core, module = pair(dtype)
    shapes = [
        (1, k_len, BATCH),
        (q_len, k_len, 1),
        (q_len, k_len, BATCH),
        (1, k_len, 1),
    ]
    options = [None, *(torch.rand(shape) < 0.6 for shape in shapes)]
    for number, mask in enumerate(options):
        # Half of the cases are self-attention.
        x = inputs(q_len, k_len, dtype=dtype)
        if q_len == k_len and number % 2:
            x = self_inputs(q_len, dtype=dtype)
        for tensor in x.values():
            tensor.requires_grad_()
        expected = core(**x, mask=with_causality(mask, is_causal, q_len, k_len))
        leaves = [*{id(t): t for t in x.values()}.values()]
        upstream = torch.randn_like(expected)
        right = torch.autograd.grad(
            expected, [*leaves, *core.parameters()], upstream, retain_graph=True
        )

        def close(ours: Tensor, theirs: Tensor, by: float = tolerance) -> None:
            torch.testing.assert_close(ours, theirs, rtol=by, atol=by)

        call = x | {"mask": mask, "is_causal": is_causal}
        for shown in (False, True):
            output = module(**call, need_weights=shown)
            output, weights = output if shown else (output, core.attn)
            close(output, expected)
            close(weights, core.attn)
            ours = [*leaves, *module.parameters()]
            for a, b in zip(
                torch.autograd.grad(output, ours, upstream), right, strict=True
            ):
                close(a, b, 20 * tolerance)
        with torch.no_grad():
            close(module(**call), expected)
            output, weights = module(**call, need_weights=True)
            close(output, expected)
            close(weights, core.attn)
            output, weights = module(**call, need_weights=True, average_weights=True)
            close(output, expected)
            close(weights, core.attn.mean(-1))


@pytest.mark.parametrize("kv_heads", [HEADS, 1])
def test_one_product_gives_what_three_give(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, kv_heads: int
) -> None:
    module = build(kv_heads=kv_heads).to(device, torch.float64)
    x = torch.randn(K_LEN, BATCH, D_MODEL, dtype=torch.float64, device=device)
    variables = [x.requires_grad_(), *module.parameters()]
    results = []
    for packed in (False, True):
        monkeypatch.setattr(
            fast.module, "can_be_packed", lambda parts, x, packed=packed: packed
        )
        output = module(query=x, key=x, value=x, is_causal=True)
        gradients = torch.autograd.grad(output.square().sum(), variables)
        results.append([output, *gradients])
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


def test_one_product_is_of_the_present_weights(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(fast.module, "can_be_packed", lambda parts, x: True)
    core, module = (each.to(device) for each in pair())
    x = torch.randn(K_LEN, BATCH, D_MODEL, device=device)
    for factor in (1.0, -1.0):
        for each in (core, module):
            each.value.linear.weight.data.mul_(factor)
            each.key.linear.bias.data.add_(factor)
        outputs = [each(query=x, key=x, value=x) for each in (core, module)]
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("content", [0.0, 1e4, math.nan, math.inf])
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
def test_self_attention_trains_with_padding_as_the_core_does(
    device: torch.device, content: float, is_causal: bool
) -> None:
    core, module = (each.to(device) for each in pair())
    x, mask = torch.randn(K_LEN, BATCH, D_MODEL), torch.ones(1, K_LEN, BATCH).bool()
    mask[:, 9:, 1], mask[:, :, 2] = False, False
    x[9:, 1] = content
    x, mask = x.to(device).requires_grad_(), mask.to(device)
    results = []
    full = with_causality(mask.cpu(), is_causal, K_LEN, K_LEN)
    for each, options in (
        (core, {"mask": full.to(device)}),
        (module, {"mask": mask, "is_causal": is_causal}),
    ):
        output = each(query=x, key=x, value=x, **options)
        loss = output[:9].square().sum()
        gradients = torch.autograd.grad(loss, [x, *each.parameters()])
        results.append([output[:9], *gradients])
    bare = fast.module.can_be_packed([module.query, module.key, module.value], x)
    assert bare == (device.type == "cuda")
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3, equal_nan=True)
    if content < 1e5:
        assert all(y.isfinite().all() for y in results[1])


def test_projections_that_may_do_more_are_called_each_by_itself() -> None:
    if not torch.cuda.is_available():
        pytest.skip("one product projects all inputs on a GPU only, and here is none")
    module = build().to("cuda")
    x = torch.randn(K_LEN, BATCH, D_MODEL, device="cuda")
    parts = [module.query, module.key, module.value]
    assert fast.module.can_be_packed(parts, x)
    assert not fast.module.can_be_packed(parts, x.double())
    with torch.no_grad():
        assert not fast.module.can_be_packed(parts, x)
    hook = module.key.linear.register_forward_hook(lambda *given: None)
    assert not fast.module.can_be_packed(parts, x)
    hook.remove()
    module.value.linear.bias = None
    assert not fast.module.can_be_packed(parts, x)


@pytest.mark.parametrize("bias", [True, False])
def test_checkpoints_load_in_both_directions(device: torch.device, bias: bool) -> None:
    core = build(mha.MultiHeadAttention, bias=bias).to(device)
    module, back = build(bias=bias).to(device), build(mha.MultiHeadAttention, bias=bias)
    module.load_state_dict(core.state_dict(), strict=True)
    back.load_state_dict(module.state_dict(), strict=True)
    assert list(back.state_dict()) == list(core.state_dict())
    x = self_inputs(device=device)
    with torch.no_grad():
        torch.testing.assert_close(module(**x), core(**x))
        torch.testing.assert_close(back.to(device)(**x), core(**x))


@pytest.mark.parametrize("q_len", [13, 17, 19])
def test_is_causal_equals_the_causal_mask(device: torch.device, q_len: int) -> None:
    module = build().to(device).eval()
    x = inputs(q_len, device=device)
    mask = masks.causal(q_len, K_LEN, device=device)
    torch.testing.assert_close(module(**x, is_causal=True), module(**x, mask=mask))


# Weights that change


def load(module: nn.Module, **how: Any) -> None:
    state = {n: torch.randn_like(t) / 4 for n, t in module.state_dict().items()}
    module.load_state_dict(state, **how)


def step(module: nn.Module) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    with torch.enable_grad():
        module(**self_inputs(dtype=torch.float64)).square().mean().backward()
    optimizer.step()


def to_float32_and_back(module: nn.Module) -> None:
    module.to(torch.float32).to(torch.float64)


def modify_data_in_place(module: Any) -> None:
    module.value.linear.weight.data.mul_(2)
    module.key.linear.weight.data.mul_(2)
    module.eval()


def replace_bias_data(module: Any) -> None:
    module.query.linear.bias.data = torch.randn(D_MODEL, dtype=torch.float64)


def replace_weights(module: Any) -> None:
    # A new weight may get the memory of a freed one.
    x = self_inputs(dtype=torch.float64)
    for _ in range(20):
        del module.key.linear.weight
        weight = nn.Parameter(torch.randn(D_MODEL, D_MODEL, dtype=torch.float64))
        module.key.linear.weight = weight
        with torch.no_grad():
            inferred = module(**x)
        torch.testing.assert_close(inferred, module(**x), rtol=1e-10, atol=1e-10)


def transpose_weight(module: Any) -> None:
    # The same memory, with other strides.
    weight = module.key.linear.weight
    module.key.linear.weight = nn.Parameter(weight.data.T)


def remove_biases(module: Any) -> None:
    module.query.linear.bias = None
    module.value.linear.bias = None


CHANGES: list[Callable[[Any], None]] = [
    load,
    lambda module: load(module, assign=True),
    step,
    to_float32_and_back,
    modify_data_in_place,
    replace_bias_data,
    replace_weights,
    transpose_weight,
    remove_biases,
    lambda module: module.query.linear.weight.requires_grad_(False).mul_(2),
    lambda module: nn.init.normal_(module.value.linear.bias),
    lambda module: module.share_memory(),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_the_output_follows_the_parameters(
    change: Callable[[Any], None], grad: Any
) -> None:
    module, x = build().double().eval(), self_inputs(dtype=torch.float64)
    with grad():
        before = module(**x)
    change(module)
    core = mha.MultiHeadAttention(HEADS, D_MODEL).double().eval()
    core.load_state_dict(module.state_dict(), strict=False)
    for name in ("query", "key", "value"):
        getattr(core, name).linear.bias = getattr(module, name).linear.bias
    with grad():
        after = module(**x)
        torch.testing.assert_close(after, core(**x), rtol=1e-12, atol=1e-12)
    moved = not torch.allclose(before, after, atol=1e-3)
    assert moved or change in (to_float32_and_back, CHANGES[-1])
    torch.testing.assert_close(module(**x), after, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shown", [False, True], ids=["bare", "shown"])
@pytest.mark.parametrize("needs_grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("k_len", [5, 17])
@pytest.mark.parametrize("worst", [1.0, 60_000.0, math.nan])
def test_padding_may_hold_numbers_whose_projection_overflows(
    worst: float, k_len: int, needs_grad: bool, shown: bool
) -> None:
    core, module = (m.eval() for m in pair(torch.float16))
    x = inputs(k_len=k_len, dtype=torch.float16)
    x["value"] = x["key"]
    # Float16 holds 60,000, but its projection overflows.
    x["key"][-2:, 1] = worst
    mask = torch.ones(1, k_len, BATCH).bool()
    mask[:, -2:, 1] = False
    calls = []
    for part in (module.query, module.key, module.value, module.output):
        part.register_forward_hook(lambda part, *_: calls.append(part))
    with torch.set_grad_enabled(needs_grad):
        output = module(**x, mask=mask, need_weights=shown)
        expected = core(**x, mask=mask)
    output = output[0] if shown else output
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-2)
    assert len(calls) == 4  # nothing is computed twice


@pytest.mark.parametrize("worst", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("seq_len", [1, 5, 7])
def test_short_self_attention_under_a_mask_is_that_of_the_core(
    seq_len: int, worst: float
) -> None:
    core, module = (m.eval() for m in pair())
    x = self_inputs(seq_len)
    x["query"][-1, 1] = worst
    full = some_mask(seq_len, seq_len)
    full[:, -1, 1] = False
    padding = torch.ones(1, seq_len, BATCH).bool()
    padding[:, -1, 1] = False
    for mask in (padding, full, full[..., :1], full.int()):
        with torch.no_grad():
            output, expected = module(**x, mask=mask), core(**x, mask=mask)
            # In the core, a visible NaN reaches fully masked rows, too.
            fully_masked = ~mask.bool().any(1).expand(seq_len, BATCH)
            expected[fully_masked] = core.output.bias
        torch.testing.assert_close(output, expected, equal_nan=True)


@pytest.mark.parametrize("place", ["query", "key.linear", "value.linear", "output"])
@pytest.mark.parametrize("when", ["forward_hook", "forward_pre_hook"])
def test_hooks_of_submodules_see_every_call(place: str, when: str) -> None:
    module, x, seen = build().eval(), self_inputs(), []
    with torch.no_grad():
        module(**x)
        hook = getattr(module.get_submodule(place), f"register_{when}")
        handle = hook(lambda part, *_: seen.append(part))
        hooked = module(**x)
        assert seen == [module.get_submodule(place)]
        handle.remove()
        torch.testing.assert_close(module(**x), hooked)
    assert len(seen) == 1


def test_parameters_passed_for_one_call_are_used_for_one_call() -> None:
    module, x = build().eval(), self_inputs()
    others = {n: 2 * p.detach() for n, p in module.named_parameters()}
    other = build().eval()
    other.load_state_dict(others)
    with torch.no_grad():
        before = module(**x)
        for _ in range(3):
            called = torch.func.functional_call(module, others, (), x)
            torch.testing.assert_close(called, other(**x))
            assert torch.equal(module(**x), before)


@pytest.mark.slow
@pytest.mark.filterwarnings(SLOW)
@pytest.mark.parametrize("grad", [torch.no_grad, torch.enable_grad])
def test_vmap_over_parameters_gives_what_a_loop_gives(grad: Any) -> None:
    modules, x = [build().eval() for _ in range(3)], self_inputs()
    stacked, _ = torch.func.stack_module_state(modules)

    def call(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(modules[0], parameters, (), x)  # type: ignore[no-any-return]

    with grad():
        modules[0](**x)
        outputs = torch.func.vmap(call)(stacked)
        for module, output in zip(modules, outputs, strict=True):
            torch.testing.assert_close(output, module(**x))


def test_copies_share_nothing() -> None:
    module, x = build(dropout_prob=0.1), self_inputs()
    module(**x).square().sum().backward()
    module.eval()
    with torch.no_grad():
        expected = module(**x)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(buffer, weights_only=False),
    ]
    for twin in copies:
        with torch.no_grad():
            assert torch.equal(twin(**x), expected)
            twin.query.linear.weight.mul_(2)
            assert not torch.equal(twin(**x), expected)
            assert torch.equal(module(**x), expected)


# No tensor of a call is retained


@pytest.fixture
def old_objects_set_aside() -> None:
    """Garbage collection looks at new objects only: a million are older."""
    gc.collect()
    gc.freeze()


def live_tensors() -> int:
    """The number of tensors that are alive, after garbage collection."""
    while gc.collect():
        pass
    with warnings.catch_warnings(action="ignore"):  # some objects warn when inspected
        return sum(issubclass(type(x), Tensor) for x in gc.get_objects())


@pytest.mark.slow
@pytest.mark.usefixtures("old_objects_set_aside")
def test_a_call_leaves_no_tensor_behind() -> None:
    module, x, mask = build(dropout_prob=0.1), self_inputs(), some_mask(k_len=Q_LEN)
    module(**x)
    before, size = live_tensors(), len(pickle.dumps(module))
    cases = itertools.product(*[(False, True)] * 4)
    for enabled, training, is_causal, shown in cases:
        module.training = training
        with torch.set_grad_enabled(enabled):
            module(**x, mask=mask, is_causal=is_causal, need_weights=shown)
    assert live_tensors() <= before
    assert len(pickle.dumps(module)) == size


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dropout_prob", [0.0, 0.1])
@pytest.mark.parametrize("window", [None, 31])
def test_memory_for_the_backward_pass_grows_linearly_with_the_length(
    is_causal: bool, dropout_prob: float, window: int | None
) -> None:
    seq_len = 211
    module, kept = build(dropout_prob=dropout_prob, window=window), []
    x = torch.randn(seq_len, 1, D_MODEL, requires_grad=True)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(query=x, key=x, value=x, is_causal=is_causal)
    assert max(kept) == seq_len * D_MODEL < seq_len**2


# Keys that no query may attend to


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("shown", [False, True], ids=["bare", "shown"])
def test_a_key_that_no_query_may_attend_to_may_hold_anything(
    device: torch.device, junk: float, is_causal: bool, shown: bool
) -> None:
    module = build().to(device)
    x, mask = inputs(device=device), some_mask().to(device)
    mask[:, 11:, 1] = False  # key 12 of another item
    mask[0, 2] = False  # one query may not, others may: this key counts
    mask[1, 2] = True
    # The mask allows key 9 for query 2 only, for which it is a future key.
    mask[:, 9, 3] = False
    mask[2, 9, 3] = True
    results = []
    for dirty in (False, True):
        y = x | {}
        for name in ("key", "value"):
            y[name] = x[name].clone()
            y[name][11:, 1] = junk if dirty else 0
            if is_causal:
                y[name][9, 3] = junk if dirty else 0
        module.zero_grad()
        call = {**y, "mask": mask, "is_causal": is_causal, "need_weights": shown}
        output = module(**call)
        (output[0] if shown else output).square().sum().backward()
        with torch.no_grad():
            bare = module(**call)
        many = [*output, *bare] if shown else [output, bare]
        results.append([*many, *(p.grad for p in module.parameters())])
    for one, other in zip(*results, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=0, atol=0)


# Dropout


def test_without_dropout_no_random_number_is_drawn(device: torch.device) -> None:
    x = self_inputs(device=device)
    quiet = build(dropout_prob=0.5).eval(), build(dropout_prob=0.0)
    for module in (each.to(device) for each in quiet):
        before = torch.random.get_rng_state()
        for shown in (False, True):
            module(**x, is_causal=True, need_weights=shown)
        module.decode(x["query"], module.cache(BATCH, Q_LEN))
        assert torch.equal(torch.random.get_rng_state(), before)


# Half precision, compilers, export, vmap


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 0.1), (torch.float16, 0.02)], ids=str
)
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
def test_half_precision_and_autocast_stay_close(
    device: torch.device, dtype: torch.dtype, tolerance: float, is_causal: bool
) -> None:
    module = build().to(device)
    half = copy.deepcopy(module).to(dtype)
    x, mask = inputs(device=device), some_mask().to(device)
    x = {name: tensor.to(dtype) for name, tensor in x.items()}
    wide = {name: tensor.float().requires_grad_() for name, tensor in x.items()}
    for tensor in x.values():
        tensor.requires_grad_()
    for m in (None, mask):
        for shown in (False, True):
            call = {"mask": m, "is_causal": is_causal, "need_weights": shown}
            expected = module(**wide, **call)
            outputs = [half(**x, **call)]
            with torch.autocast(device.type, dtype=dtype):
                outputs.append(module(**wide, **call))
                mixed = wide | {"query": x["query"]}
                outputs.append(module(**mixed, **call))
            right = expected[0] if shown else expected
            gradients = torch.autograd.grad(right.square().mean(), list(wide.values()))
            for n, output in enumerate(outputs):
                made = output[0] if shown else output
                assert made.dtype == dtype
                close = {"rtol": tolerance, "atol": tolerance}
                torch.testing.assert_close(made.float(), right, **close)
                if shown:
                    torch.testing.assert_close(output[1].float(), expected[1], **close)
                like = list((wide if n else x).values())
                like[0] = x["query"] if n == 2 else like[0]
                ours = torch.autograd.grad(made.float().square().mean(), like)
                for a, b in zip(ours, gradients, strict=True):
                    torch.testing.assert_close(a.float(), b, **close)


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("dropout_prob", [0.0, 0.1])
def test_shapes_can_be_found_without_any_data(
    is_causal: bool, dropout_prob: float
) -> None:
    module = build(dropout_prob=dropout_prob).to("meta")
    for mask in (None, some_mask().to("meta"), some_mask().int().to("meta")):
        x = inputs(device="meta")
        y = module(**x, mask=mask, is_causal=is_causal)
        assert y.shape == (Q_LEN, BATCH, D_MODEL)
        y, weights = module(**x, mask=mask, is_causal=is_causal, need_weights=True)
        assert y.shape == (Q_LEN, BATCH, D_MODEL)
        assert weights.shape == (Q_LEN, K_LEN, BATCH, HEADS)
    with torch.no_grad():
        y = module(**self_inputs(device="meta"))
    assert y.shape == (Q_LEN, BATCH, D_MODEL)
    y, cache = module.decode(y, module.cache(BATCH, Q_LEN))
    assert (y.shape, len(cache)) == ((Q_LEN, BATCH, D_MODEL), Q_LEN)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
def test_compiles_whole_and_gives_the_same(
    device: torch.device, is_causal: bool
) -> None:
    torch.compiler.reset()
    module = build().to(device)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    for mask in (None, some_mask().int()):
        for shown in (False, True):
            x = inputs(device=device)
            for tensor in x.values():
                tensor.requires_grad_()
            call = {"mask": mask if mask is None else mask.to(device)}
            call |= {"is_causal": is_causal, "need_weights": shown}
            results = []
            for each in (module, compiled):
                output = each(**x, **call)
                output, weights = output if shown else (output, output)
                loss = output.square().mean() + weights.square().mean()
                gradients = torch.autograd.grad(loss, list(x.values()))
                results.append([output, weights, *gradients])
            for one, other in zip(*results, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        x = self_inputs(device=device)
        torch.testing.assert_close(compiled(**x), module(**x))
        module.query.linear.weight.mul_(2)
        torch.testing.assert_close(compiled(**x), module(**x))


@pytest.mark.slow
def test_exports_with_returned_weights(device: torch.device) -> None:
    module = build().to(device).eval()
    q_len, k_len, batch = (
        torch.export.Dim(n, min=2) for n in ("q_len", "k_len", "batch")
    )
    dynamic = {
        "query": {0: q_len, 1: batch},
        "key": {0: k_len, 1: batch},
        "value": {0: k_len, 1: batch},
        "mask": {0: q_len, 1: k_len, 2: batch},
        "need_weights": None,
    }
    x = inputs(device=device) | {"mask": some_mask().to(device)}
    program = torch.export.export(
        module,
        args=(),
        kwargs=x | {"need_weights": True},
        dynamic_shapes=dynamic,
        strict=False,
    )
    other = inputs(11, 13, 19, device=device)
    call = {**other, "mask": some_mask(11, 13, 19).to(device), "need_weights": True}
    torch.testing.assert_close(program.module()(**call), module(**call))


@pytest.mark.filterwarnings(SLOW)
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
def test_vmap_gives_what_a_loop_gives(
    device: torch.device, is_causal: bool, masked: bool
) -> None:
    module = build().to(device).eval()
    x = [inputs(device=device) for _ in range(2)]
    mask = torch.stack([some_mask(), some_mask()]).to(device)
    stacked = {name: torch.stack([one[name] for one in x]) for name in x[0]}

    def loss(kw: dict[str, Tensor], mask: Tensor | None) -> Tensor:
        output: Tensor = module(**kw, mask=mask, is_causal=is_causal)
        return output.square().mean()

    def shown(kw: dict[str, Tensor], mask: Tensor | None) -> Any:
        return module(**kw, mask=mask, is_causal=is_causal, need_weights=True)

    dims = (0, 0) if masked else (0, None)
    m = mask if masked else None
    for call in (torch.func.grad_and_value(loss), shown):
        made = torch.func.vmap(call, in_dims=dims)(stacked, m)
        for n, one in enumerate(x):
            expected = call(one, mask[n] if masked else None)
            for a, b in zip(
                torch.utils._pytree.tree_leaves(made),
                torch.utils._pytree.tree_leaves(expected),
                strict=True,
            ):
                torch.testing.assert_close(a[n], b)
    with torch.no_grad():
        outputs, _ = torch.func.vmap(shown, in_dims=dims)(stacked, m)
        expected, _ = shown(x[1], mask[1] if masked else None)
        torch.testing.assert_close(outputs[1], expected)


# Errors

ONES = torch.ones(Q_LEN, K_LEN, BATCH)
KEY = torch.randn(K_LEN, BATCH, D_MODEL)


@pytest.mark.parametrize(
    "settings",
    [(10, 512), (0, 8), (2, -4), (2.0, 8), (True, 8), (2, 8, "0.1"), (2, 8, 1.5)],
    ids=str,
)
def test_impossible_settings_are_refused_as_in_the_core(
    settings: tuple[Any, ...],
) -> None:
    with pytest.raises(ValueError, match="must ") as said:
        mha.MultiHeadAttention(*settings)
    with pytest.raises(ValueError, match=f"^{re.escape(str(said.value))}$"):
        fast.MultiHeadAttention(*settings)


@pytest.mark.parametrize(
    "changed",
    [
        {"key": KEY[..., :29]},
        {"query": KEY[:, 0]},
        {"key": KEY[:, :1]},
        {"value": KEY[:1]},
        {"value": KEY.double()},
        {"query": KEY.long()},
        {"key": KEY.to("meta")},
        {"value": KEY.to_sparse()},
        {"key": None},
        {"query": [[[0.0]]]},
        {"mask": ONES},
        {"mask": ONES[..., 0].bool()},
        {"mask": ONES.bool().transpose(0, 1)},
        {"mask": ONES[:, :1].bool()},
        {"mask": ONES.bool()[..., None]},
        {"mask": ONES.int() * -10_000},
        {"mask": ONES.bool().to("meta")},
        {"mask": ONES.bool().tolist()},
    ],
)
def test_invalid_inputs_raise_the_errors_of_the_core_before_any_work(
    changed: dict[str, Any],
) -> None:
    core, module = pair()
    worked: list[nn.Module] = []
    for each in module.modules():
        each.register_forward_hook(lambda module, *_: worked.append(module))
    with pytest.raises((TypeError, ValueError), match="`") as said:
        core(**inputs() | changed)
    for grad in (torch.no_grad, torch.enable_grad):
        with grad(), pytest.raises(said.type, match=f"^{re.escape(str(said.value))}$"):
            module(**inputs() | changed)
    assert not worked


def test_invalid_inputs_are_refused_by_decode() -> None:
    module = build()
    cache = module.cache(BATCH, 7)
    with pytest.raises(ValueError, match=r"`x` has shape .* `x.unsqueeze\(0\)`"):
        module.decode(KEY[0], cache)
    with pytest.raises(ValueError, match=r"`x` has shape .* d_model \(=33\)"):
        module.decode(KEY[..., 1:], cache)
    with pytest.raises(TypeError, match=r"`x` is torch\.float64, the module"):
        module.decode(KEY.double(), cache)
    with pytest.raises(ValueError, match=re.escape("not [seq_len, batch_size (=5)")):
        module.decode(KEY[:, :2], cache)
    with pytest.raises(ValueError, match="the cache is full"):
        module.decode(KEY[:8], cache)
    with pytest.raises(TypeError, match=r"`key` is torch.float64, the cache"):
        module.double().decode(KEY[:2].double(), cache)
    assert len(cache) == 0


# Decoding


def decode(
    module: Any, x: Tensor, cuts: list[int], cache: KeyValueCache | None = None
) -> Tensor:
    """The outputs of a sequence that is decoded in pieces."""
    cache = module.cache(x.shape[1], 2, grow=True) if cache is None else cache
    pieces = []
    for piece in x.split(cuts):
        y, cache = module.decode(piece, cache)
        pieces.append(y)
    return torch.cat(pieces)


def compositions(length: int) -> Iterator[list[int]]:
    if not length:
        yield []
    for first in range(1, length + 1):
        for rest in compositions(length - first):
            yield [first, *rest]


@pytest.mark.slow
@pytest.mark.parametrize("few", [2, 128])
def test_decoding_in_any_pieces_equals_one_causal_pass(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, few: int
) -> None:
    monkeypatch.setattr(formula, "SHORT_KEYS", few)
    module = fast.MultiHeadAttention(HEADS, D_MODEL).to(device).eval()
    x = torch.randn(7, BATCH, D_MODEL, device=device)
    at_once = module(query=x, key=x, value=x, is_causal=True)
    all_cuts = list(compositions(7))
    assert len(all_cuts) == 64
    for cuts in all_cuts:
        torch.testing.assert_close(decode(module, x, cuts), at_once, rtol=0, atol=1e-6)


def test_one_piece_is_one_pass_bit_for_bit(device: torch.device) -> None:
    module = build().to(device).eval()
    x = torch.randn(Q_LEN, BATCH, D_MODEL, device=device)
    with torch.no_grad():
        at_once = module(query=x, key=x, value=x, is_causal=True)
        assert torch.equal(decode(module, x, [Q_LEN]), at_once)
        in_two = decode(module, x, [5, 8])
        assert torch.equal(decode(module, x, [5, 8]), in_two)


@pytest.mark.parametrize("cuts", [[13], [9, 1, 3], [1] * 13], ids=str)
def test_the_cache_under_autocast_has_the_dtype_of_the_projections(
    device: torch.device, cuts: list[int]
) -> None:
    module = build().to(device).eval()
    x = torch.randn(Q_LEN, BATCH, D_MODEL, device=device)
    right = decode(module, x, cuts)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        cache = module.cache(BATCH, Q_LEN)
        output = decode(module, x, cuts, cache)
    assert cache.keys.dtype == output.dtype == torch.bfloat16
    assert module.cache(BATCH, Q_LEN).keys.dtype == torch.float32
    torch.testing.assert_close(output.float(), right, rtol=0.1, atol=0.1)


def test_reordered_beams_continue_from_the_given_items(device: torch.device) -> None:
    module = build().to(device).eval()
    prompt = torch.randn(5, 3, D_MODEL, device=device)
    token = torch.randn(1, 7, D_MODEL, device=device)
    order = torch.tensor([2, 2, 0, 1, 1, 2, 0], device=device)  # more beams than items
    _, cache = module.decode(prompt, module.cache(3, 6))
    cache.reorder(order)
    output, _ = module.decode(token, cache)
    expected = decode(module, torch.cat([prompt[:, order], token]), [6])
    torch.testing.assert_close(output, expected[-1:])


@pytest.mark.slow
@pytest.mark.usefixtures("old_objects_set_aside")
def test_decoding_has_no_gradient_and_no_dropout_and_retains_no_tensor() -> None:
    module = build(dropout_prob=0.5)
    x = torch.randn(7, BATCH, D_MODEL, requires_grad=True)
    output = decode(module, x, [2, 5])
    assert module.training
    assert not output.requires_grad
    with torch.no_grad():
        expected = module.eval()(query=x, key=x, value=x, is_causal=True)
    torch.testing.assert_close(output, expected)
    cache = module.cache(BATCH, 200)
    place, sizes = cache.buffer.data_ptr(), []
    for _ in range(3):
        for _ in range(50):
            output, cache = module.decode(x[:1].detach(), cache)
        sizes.append(live_tensors())
    assert len(set(sizes)) == 1
    assert cache.buffer.data_ptr() == place


def test_the_cache_is_made_for_the_module(device: torch.device) -> None:
    module = build().to(device, torch.float64)
    cache = module.cache(BATCH, 7, grow=True)
    assert cache.buffer.shape == (2, BATCH, HEADS, 7, D_K)
    assert (cache.buffer.dtype, cache.buffer.device.type) == (
        torch.float64,
        device.type,
    )
    assert cache.grow
    assert not module.cache(BATCH, 7).grow


# The laws


class Decoding(fast.MultiHeadAttention):
    """Self-attention that decodes its input in pieces, as generation does."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return decode(self, x, [1 + len(x) // 2, *[1] * (len(x) - 1 - len(x) // 2)])


@pytest.mark.slow
def test_decoding_passes_all_laws_that_need_no_gradient_and_no_dropout() -> None:
    with_gradients = [
        "causal_gradient",
        "gradients",
        "parameter_gradients",
        "allowed_keys_attended",
    ]
    # Decoding has no dropout, on purpose.
    report = check(Decoding, skip=[*with_gradients, "dropout"])
    assert report.ok, report
    assert len(report.passed) >= 12


def test_decoding_without_a_cache_says_how_to_make_one() -> None:
    message = "`cache` is a NoneType, not a KeyValueCache; make one with `cache("
    with pytest.raises(TypeError, match=re.escape(message)):
        build().decode(torch.randn(1, BATCH, D_MODEL), None)
