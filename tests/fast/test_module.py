"""The answers of the core, by faster means; and what those means must not break."""

import copy
import gc
import io
import math
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attention_laws import check
from headnotes import fast, masks, mha
from headnotes.fast import KeyValueCache
from headnotes.fast import attention as ways

# Prime and pairwise distinct, so that no swapped pair of axes can pass unseen.
Q_LEN, K_LEN, BATCH, HEADS, D_K = 13, 17, 5, 11, 3
D_MODEL = HEADS * D_K

# PyTorch's kernel has no rule for `vmap`, and says that it takes one item at a time.
SLOW = "ignore:There is a performance drop:UserWarning"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every path is walked at small sizes: tiles have 4 rows, and 8 of 11 heads."""
    monkeypatch.setattr(ways, "TILE_ROWS", 4)
    monkeypatch.setattr(ways, "TILE_SCORES", 1)
    monkeypatch.setattr(ways, "SHORT_KEYS", 7)


def build(
    kind: type[nn.Module] = fast.MultiHeadAttention,
    heads: int = HEADS,
    d_k: int = D_K,
    dropout_prob: float = 0.0,
    **settings: Any,
) -> Any:
    """A module whose rows of attention differ: weights well above the usual scale."""
    module = kind(heads, heads * d_k, dropout_prob, **settings)  # type: ignore[call-arg]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) / (heads * d_k) ** 0.4)
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
    return {
        "query": torch.randn(q_len, batch_size, D_MODEL, **like),
        "key": torch.randn(k_len, batch_size, D_MODEL, **like),
        "value": torch.randn(k_len, batch_size, D_MODEL, **like),
    }


def alone(seq_len: int = Q_LEN, batch_size: int = BATCH, **like: Any) -> dict[str, Any]:
    """One tensor as query, key and value: self-attention."""
    x = torch.randn(seq_len, batch_size, D_MODEL, **like)
    return {"query": x, "key": x, "value": x}


def some_mask(
    q_len: int = Q_LEN, k_len: int = K_LEN, batch_size: int = BATCH
) -> Tensor:
    """A random mask; every fifth of its rows is empty."""
    mask = torch.rand(q_len, k_len, batch_size) < 0.6
    mask[::5] = False
    return mask


def both(mask: Tensor | None, is_causal: bool, q_len: int, k_len: int) -> Any:
    """For the core, which is told of causality by a mask only."""
    if not is_causal:
        return mask
    past = torch.ones(q_len, k_len).bool().tril(k_len - q_len).unsqueeze(-1)
    return past if mask is None else past & mask.bool()


# The same answers


@pytest.mark.slow
@pytest.mark.parametrize("scores", [1, 2 * HEADS * 4 * K_LEN])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-6)], ids=str
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
    monkeypatch.setattr(ways, "TILE_SCORES", scores)
    core, module = pair(dtype)
    shapes = [
        (1, k_len, BATCH),
        (q_len, k_len, 1),
        (q_len, k_len, BATCH),
        (1, k_len, 1),
    ]
    options = [None, *(torch.rand(shape) < 0.6 for shape in shapes)]
    for number, mask in enumerate(options):
        # Half of the time it reads itself.
        x = inputs(q_len, k_len, dtype=dtype)
        if q_len == k_len and number % 2:
            x = alone(q_len, dtype=dtype)
        for tensor in x.values():
            tensor.requires_grad_()
        expected = core(**x, mask=both(mask, is_causal, q_len, k_len))
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


@pytest.mark.parametrize("bias", [True, False])
def test_checkpoints_load_in_both_directions(device: torch.device, bias: bool) -> None:
    core = build(mha.MultiHeadAttention, bias=bias).to(device)
    module, back = build(bias=bias).to(device), build(mha.MultiHeadAttention, bias=bias)
    module.load_state_dict(core.state_dict(), strict=True)
    back.load_state_dict(module.state_dict(), strict=True)
    assert list(back.state_dict()) == list(core.state_dict())
    x = alone(device=device)
    with torch.no_grad():
        torch.testing.assert_close(module(**x), core(**x))
        torch.testing.assert_close(back.to(device)(**x), core(**x))


@pytest.mark.parametrize("q_len", [13, 17, 19])
def test_is_causal_says_what_the_causal_mask_says(
    device: torch.device, q_len: int
) -> None:
    module = build().to(device).eval()
    x = inputs(q_len, device=device)
    mask = masks.causal(q_len, K_LEN, device=device)
    torch.testing.assert_close(module(**x, is_causal=True), module(**x, mask=mask))


def test_a_mask_means_the_same_in_every_dtype(device: torch.device) -> None:
    module, x = build().to(device).eval(), inputs(device=device)
    mask = some_mask().to(device)
    for dtype in (torch.uint8, torch.int32, torch.int64):
        assert torch.equal(module(**x, mask=mask.to(dtype)), module(**x, mask=mask))


def test_first_derivatives_are_those_of_finite_differences(
    device: torch.device,
) -> None:
    module = build(heads=2, d_k=3).to(device, torch.float64).eval()
    options = {"dtype": torch.float64, "device": device, "requires_grad": True}
    x = tuple(torch.randn(n, 1, 6, **options) for n in (5, 11, 11))
    mask = some_mask(5, 11, 1).to(device)
    for is_causal in (False, True):

        def f(query: Tensor, key: Tensor, value: Tensor, c: bool = is_causal) -> Tensor:
            call = {"query": query, "key": key, "value": value, "mask": mask}
            return module(**call, is_causal=c)  # type: ignore[no-any-return]

        assert torch.autograd.gradcheck(f, x)


# Weights that change


def load(module: nn.Module, **how: Any) -> None:
    state = {n: torch.randn_like(t) / 4 for n, t in module.state_dict().items()}
    module.load_state_dict(state, **how)


def step(module: nn.Module) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    with torch.enable_grad():
        module(**alone(dtype=torch.float64)).square().mean().backward()
    optimizer.step()


def there_and_back(module: nn.Module) -> None:
    module.to(torch.float32).to(torch.float64)


def behind_the_back(module: Any) -> None:
    module.value.linear.weight.data.mul_(2)
    module.key.linear.weight.data.mul_(2)
    module.eval()


def of_its_bias(module: Any) -> None:
    module.query.linear.bias.data = torch.randn(D_MODEL, dtype=torch.float64)


def replaced(module: Any) -> None:
    # Whoever is freed makes room, and another may come to lie there.
    x = alone(dtype=torch.float64)
    for _ in range(20):
        del module.key.linear.weight
        weight = nn.Parameter(torch.randn(D_MODEL, D_MODEL, dtype=torch.float64))
        module.key.linear.weight = weight
        with torch.no_grad():
            inferred = module(**x)
        torch.testing.assert_close(inferred, module(**x), rtol=1e-10, atol=1e-10)


def turned(module: Any) -> None:
    # The same memory, read otherwise.
    weight = module.key.linear.weight
    module.key.linear.weight = nn.Parameter(weight.data.T)


def without_bias(module: Any) -> None:
    module.query.linear.bias = None
    module.value.linear.bias = None


CHANGES: list[Callable[[Any], None]] = [
    load,
    lambda module: load(module, assign=True),
    step,
    there_and_back,
    behind_the_back,
    of_its_bias,
    replaced,
    turned,
    without_bias,
    lambda module: module.query.linear.weight.requires_grad_(False).mul_(2),
    lambda module: nn.init.normal_(module.value.linear.bias),
    lambda module: module.share_memory(),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_the_output_follows_the_parameters(
    change: Callable[[Any], None], grad: Any
) -> None:
    module, x = build().double().eval(), alone(dtype=torch.float64)
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
    assert moved or change in (there_and_back, CHANGES[-1])
    torch.testing.assert_close(module(**x), after, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shown", [False, True], ids=["bare", "shown"])
@pytest.mark.parametrize("learns", [False, True], ids=["reads", "learns"])
@pytest.mark.parametrize("k_len", [5, 17])
@pytest.mark.parametrize("worst", [1.0, 60_000.0, math.nan])
def test_padding_may_hold_what_no_product_can_bear(
    worst: float, k_len: int, learns: bool, shown: bool
) -> None:
    core, module = (m.eval() for m in pair(torch.float16))
    x = inputs(k_len=k_len, dtype=torch.float16)
    x["value"] = x["key"]
    # In float16 60,000 is a number; what a projection makes of it is none.
    x["key"][-2:, 1] = worst
    mask = torch.ones(1, k_len, BATCH).bool()
    mask[:, -2:, 1] = False
    calls = []
    for part in (module.query, module.key, module.value, module.output):
        part.register_forward_hook(lambda part, *_: calls.append(part))
    with torch.set_grad_enabled(learns):
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
    x = alone(seq_len)
    x["query"][-1, 1] = worst
    full = some_mask(seq_len, seq_len)
    full[:, -1, 1] = False
    padding = torch.ones(1, seq_len, BATCH).bool()
    padding[:, -1, 1] = False
    for mask in (padding, full, full[..., :1], full.int()):
        with torch.no_grad():
            torch.testing.assert_close(
                module(**x, mask=mask), core(**x, mask=mask), equal_nan=True
            )


@pytest.mark.parametrize("place", ["query", "key.linear", "value.linear", "output"])
@pytest.mark.parametrize("when", ["forward_hook", "forward_pre_hook"])
def test_who_hooks_into_a_part_sees_every_call(place: str, when: str) -> None:
    module, x, seen = build().eval(), alone(), []
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
    module, x = build().eval(), alone()
    others = {n: 2 * p.detach() for n, p in module.named_parameters()}
    other = build().eval()
    other.load_state_dict(others)
    with torch.no_grad():
        before = module(**x)
        for _ in range(3):
            called = torch.func.functional_call(module, others, (), x)
            torch.testing.assert_close(called, other(**x))
            assert torch.equal(module(**x), before)


@pytest.mark.filterwarnings(SLOW)
@pytest.mark.parametrize("grad", [torch.no_grad, torch.enable_grad])
def test_vmap_over_parameters_gives_what_a_loop_gives(grad: Any) -> None:
    modules, x = [build().eval() for _ in range(3)], alone()
    stacked, _ = torch.func.stack_module_state(modules)

    def call(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(modules[0], parameters, (), x)  # type: ignore[no-any-return]

    with grad():
        modules[0](**x)
        outputs = torch.func.vmap(call)(stacked)
        for module, output in zip(modules, outputs, strict=True):
            torch.testing.assert_close(output, module(**x))


def test_copies_share_nothing() -> None:
    module, x = build(dropout_prob=0.1), alone()
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


# Nothing of a call stays


def alive() -> int:
    """How many tensors there are, when what others have left behind is gone."""
    while gc.collect():
        pass
    with warnings.catch_warnings(action="ignore"):  # some objects dislike being asked
        return sum(issubclass(type(x), Tensor) for x in gc.get_objects())


@pytest.mark.slow
@pytest.mark.parametrize("grad", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("is_causal", [False, True])
def test_nothing_of_a_call_is_kept(grad: Any, is_causal: bool) -> None:
    module, x, mask = build(dropout_prob=0.1), alone(), some_mask(k_len=Q_LEN)
    with grad():
        module(**x)
    before, size = alive(), len(pickle.dumps(module))
    for training in (True, False):
        module.training = training
        with grad():
            for shown in (False, True):
                module(**x, mask=mask, is_causal=is_causal, need_weights=shown)
    assert alive() <= before
    assert len(pickle.dumps(module)) == size


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dropout_prob", [0.0, 0.1])
def test_what_the_way_back_keeps_grows_with_the_length_only(
    is_causal: bool, dropout_prob: float
) -> None:
    seq_len = 211
    module, kept = build(dropout_prob=dropout_prob), []
    x = torch.randn(seq_len, 1, D_MODEL, requires_grad=True)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(query=x, key=x, value=x, is_causal=is_causal)
    assert max(kept) == seq_len * D_MODEL < seq_len**2


def test_inputs_masks_and_parameters_are_left_alone(device: torch.device) -> None:
    module = build(dropout_prob=0.1).to(device)
    # Views of larger tensors: writing through them would be seen too.
    x = {n: t.mT.contiguous().mT for n, t in inputs(device=device).items()}
    x["mask"] = (torch.rand(1, K_LEN, 1, device=device) < 0.6).expand(Q_LEN, -1, BATCH)
    before = {name: t.clone() for name, t in [*x.items(), *module.state_dict().items()]}
    for shown in (False, True):
        for causal in (False, True):
            output = module(**x, is_causal=causal, need_weights=shown)
            (output[0] if shown else output).sum().backward()
            with torch.no_grad():
                module(**x, is_causal=causal, need_weights=shown)
    for name, tensor in [*x.items(), *module.state_dict().items()]:
        assert torch.equal(tensor, before[name]), name


# Rows without keys, and keys that none may read


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("shown", [False, True], ids=["bare", "shown"])
def test_a_key_that_no_query_may_read_may_hold_anything(
    device: torch.device, junk: float, is_causal: bool, shown: bool
) -> None:
    module = build().to(device)
    x, mask = inputs(device=device), some_mask().to(device)
    mask[:, 11:, 1] = False  # key 12 of another item
    mask[0, 2] = False  # one query may not, others may: this key counts
    mask[1, 2] = True
    # By the mask query 2 alone may read key 9, which by causality is in its future.
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


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("dropout_prob", [0.0, 0.3])
def test_an_empty_row_reads_zero_and_its_gradients_are_finite(
    device: torch.device, dtype: torch.dtype, is_causal: bool, dropout_prob: float
) -> None:
    module = build(dropout_prob=dropout_prob).to(device, dtype)
    x = inputs(K_LEN, Q_LEN, device=device, dtype=dtype)  # causality leaves 4 rows none
    for tensor in x.values():
        tensor.requires_grad_()
    mask = some_mask(K_LEN, Q_LEN).to(device)
    mask[:, :, 1] = False  # batch item 1 altogether
    for shown in (False, True):
        y = module(**x, mask=mask, is_causal=is_causal, need_weights=shown)
        y, weights = y if shown else (y, torch.zeros(K_LEN, Q_LEN, BATCH, HEADS))
        bias = module.output.bias
        rows = [5, 10, 15, *(range(4) if is_causal else [0])]
        assert torch.equal(y[rows], bias.expand_as(y[rows]))
        assert torch.equal(y[:, 1], bias.expand_as(y[:, 1]))
        assert not weights[rows].any()
        assert not weights[:, :, 1].any()
        with torch.autograd.set_detect_anomaly(True, check_nan=True):
            y.float().square().mean().backward()
        for name, tensor in [*x.items(), *module.named_parameters()]:
            assert tensor.grad is not None, name
            assert tensor.grad.isfinite().all(), name


@pytest.mark.parametrize(
    ("q_len", "k_len", "batch_size"),
    [(0, 7, 3), (5, 0, 3), (5, 7, 0), (0, 0, 3), (0, 0, 0)],
)
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("dropout_prob", [0.0, 1.0])
def test_empty_sequences_and_batches_give_what_the_core_gives(
    q_len: int,
    k_len: int,
    batch_size: int,
    masked: bool,
    is_causal: bool,
    dropout_prob: float,
) -> None:
    core, module = pair(dropout_prob=dropout_prob)
    x = inputs(q_len, k_len, batch_size)
    if not k_len:
        x["query"].fill_(math.nan)  # which spoils nothing that it could read
    mask = torch.ones(q_len, k_len, batch_size).bool() if masked else None
    expected = core(**x, mask=both(mask, is_causal, q_len, k_len))
    for shown in (False, True):
        output = module(**x, mask=mask, is_causal=is_causal, need_weights=shown)
        output, weights = output if shown else (output, core.attn)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(weights, core.attn)
        output.sum().backward()
        with torch.no_grad():
            module(**x, mask=mask, is_causal=is_causal, need_weights=shown)


# Dropout


@pytest.mark.slow
@pytest.mark.parametrize("few", [0, 64], ids=["many keys", "few keys"])
def test_the_mean_over_many_draws_is_the_output_without_dropout(
    device: torch.device, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways, "SHORT_KEYS", few)
    module = build(dropout_prob=0.3).to(device)
    with torch.no_grad():
        x = inputs(device=device)
        draws = torch.stack([module(**x) for _ in range(400)])
        expected = module.eval()(**x)
    error = draws.std(0) / math.sqrt(len(draws))
    off = (draws.mean(0) - expected) / error
    assert off.abs().max() < 5  # of 2,145 numbers the largest is expected at 3.5
    assert abs(off.mean()) < 4 / math.sqrt(D_MODEL)


@pytest.mark.parametrize("shown", [False, True], ids=["bare", "shown"])
def test_the_seed_fixes_the_draws_and_each_call_draws_anew(
    device: torch.device, shown: bool
) -> None:
    module, x = build(dropout_prob=0.5).to(device), inputs(device=device)
    outputs = []
    for _ in range(2):
        torch.manual_seed(5)
        calls = [module(**x, need_weights=shown) for _ in range(2)]
        outputs.append([y[0] if shown else y for y in calls])
    assert not torch.equal(outputs[0][0], outputs[0][1])
    for one, other in zip(*outputs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
def test_checkpointing_repeats_the_draws(device: torch.device, is_causal: bool) -> None:
    module, x = build(dropout_prob=0.5).to(device), inputs(device=device)
    query = x.pop("query").requires_grad_()

    def call(query: Tensor) -> Tensor:
        return module(query=query, **x, is_causal=is_causal)  # type: ignore[no-any-return]

    results = []
    for run in (call, lambda query: checkpoint(call, query, use_reentrant=False)):
        torch.manual_seed(5)
        output = run(query)
        results.append([output, *torch.autograd.grad(output.square().sum(), query)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_dropout_leaves_only_biases_where_every_weight_is_dropped(
    device: torch.device,
) -> None:
    module = build(dropout_prob=1.0).to(device)
    x = inputs(device=device)
    for tensor in x.values():
        tensor.requires_grad_()
    for shown in (False, True):
        y = module(**x, need_weights=shown)
        y = y[0] if shown else y
        assert torch.equal(y, module.output.bias.expand_as(y))
        gradients = torch.autograd.grad(y.square().sum(), list(x.values()))
        assert not any(g.any() for g in gradients)


def test_shown_weights_are_those_before_dropout(device: torch.device) -> None:
    module, x = build(dropout_prob=0.5).to(device), inputs(device=device)
    for grad in (torch.no_grad, torch.enable_grad):
        with grad():
            _, weights = module.train()(**x, need_weights=True)
            _, expected = module.eval()(**x, need_weights=True)
        torch.testing.assert_close(weights, expected)
        ones = torch.ones(Q_LEN, BATCH, HEADS, device=device)
        torch.testing.assert_close(weights.sum(1), ones)


def test_without_dropout_no_random_number_is_drawn(device: torch.device) -> None:
    x = alone(device=device)
    quiet = build(dropout_prob=0.5).eval(), build(dropout_prob=0.0)
    for module in (each.to(device) for each in quiet):
        before = torch.random.get_rng_state()
        for shown in (False, True):
            module(**x, is_causal=True, need_weights=shown)
        module.decode(x["query"], module.cache(BATCH, Q_LEN))
        assert torch.equal(torch.random.get_rng_state(), before)


# What it works under


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
        y = module(**alone(device="meta"))
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
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for mask in (None, some_mask(), some_mask().int()):
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
        x = alone(device=device)
        torch.testing.assert_close(compiled(**x), module(**x))
        module.query.linear.weight.mul_(2)
        torch.testing.assert_close(compiled(**x), module(**x))


@pytest.mark.slow
def test_compiles_at_most_twice_for_all_lengths(device: torch.device) -> None:
    torch.compiler.reset()
    module = build().to(device).eval()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for length in (4, 5, 7, 11, 13):
        x = inputs(length, length, device=device)
        torch.testing.assert_close(
            compiled(**x, is_causal=True), module(**x, is_causal=True)
        )
    assert counter.frame_count <= 2


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("shown", [False, True], ids=["bare", "shown"])
def test_exports_with_dynamic_lengths_and_batch(
    device: torch.device, strict: bool, shown: bool
) -> None:
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
        kwargs=x | {"need_weights": shown},
        dynamic_shapes=dynamic,
        strict=strict,
    )
    other = inputs(11, 13, 19, device=device)
    call = {**other, "mask": some_mask(11, 13, 19).to(device), "need_weights": shown}
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


# What it refuses, in the words of the core

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
def test_what_does_not_fit_is_refused_as_in_the_core_before_any_work(
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


def test_what_does_not_fit_is_refused_by_decode() -> None:
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
    """The outputs of a sequence that comes in pieces."""
    cache = module.cache(x.shape[1], 2, grow=True) if cache is None else cache
    pieces = []
    for piece in x.split(cuts):
        y, cache = module.decode(piece, cache)
        pieces.append(y)
    return torch.cat(pieces)


def ways_to_cut(length: int) -> Iterator[list[int]]:
    if not length:
        yield []
    for first in range(1, length + 1):
        for rest in ways_to_cut(length - first):
            yield [first, *rest]


@pytest.mark.parametrize("few", [2, 128])
def test_whatever_the_pieces_the_outputs_are_those_of_one_causal_pass(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, few: int
) -> None:
    monkeypatch.setattr(ways, "SHORT_KEYS", few)
    module = fast.MultiHeadAttention(HEADS, D_MODEL).to(device).eval()
    x = torch.randn(7, BATCH, D_MODEL, device=device)
    at_once = module(query=x, key=x, value=x, is_causal=True)
    all_cuts = list(ways_to_cut(7))
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
def test_decoding_under_autocast_keeps_what_its_products_come_in(
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


def test_beams_go_on_from_what_they_were_told_to(device: torch.device) -> None:
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
def test_decoding_never_learns_drops_nothing_and_holds_on_to_nothing() -> None:
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
        sizes.append(alive())
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
    """Reads itself piece by piece, as a language model does that writes."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return decode(self, x, [1 + len(x) // 2, *[1] * (len(x) - 1 - len(x) // 2)])


@pytest.mark.slow
def test_decoding_keeps_every_law_that_needs_no_gradient() -> None:
    with_gradients = [
        "causal_gradient",
        "gradients",
        "parameter_gradients",
        "allowed_keys_attended",
    ]
    report = check(Decoding, skip=with_gradients)
    assert report.ok, report
    assert len(report.passed) >= 12


def test_decoding_without_a_cache_says_how_to_make_one() -> None:
    message = "`cache` is a NoneType, not a KeyValueCache; make one with `cache("
    with pytest.raises(TypeError, match=re.escape(message)):
        build().decode(torch.randn(1, BATCH, D_MODEL), None)
