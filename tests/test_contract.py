"""What all implementations of attention have in common, each claim written once.

`contract.py` says how each implementation is built and called. What is special to one
of them is tested in the file of its own name.
"""

import copy
import io
import math
import pickle
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.torch_version import TorchVersion
from torch.utils.flop_counter import FlopCounterMode

import oracle
from contract import CONTEXT_LENGTH, Implementation, Sizes, ValidLens, each

HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)

# `vmap` calls PyTorch's attention kernel for one item at a time, and warns of it.
VMAP_IS_SLOW = "ignore:There is a performance drop:UserWarning"


def query_key_value(
    one: Implementation, arguments: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs, sequence first; self-attention has one for all three."""
    names = one.inputs(one.sizes())
    inputs = [one.sequence_first(arguments[name]) for name in names]
    query, key, value = inputs if len(inputs) == 3 else inputs * 3
    return query, key, value


def by_loops(
    one: Implementation,
    module: nn.Module,
    sizes: Sizes,
    arguments: dict[str, Any],
    mask: Tensor,
) -> tuple[Tensor, Tensor]:
    """Output and weights by the oracle, sequence first."""
    inputs = [x.tolist() for x in query_key_value(one, arguments)]
    parameters = {
        name: (weight.tolist(), None if bias is None else bias.tolist())
        for name, (weight, bias) in one.projections(module).items()
    }
    results = oracle.attention(*inputs, mask.tolist(), parameters, sizes.heads)
    output, weights = (torch.tensor(x, dtype=torch.float64) for x in results)
    return output, weights


def by_torch(
    one: Implementation,
    module: nn.Module,
    sizes: Sizes,
    arguments: dict[str, Any],
    mask: Tensor,
) -> Tensor:
    """The output by PyTorch's own attention, sequence first."""
    projections = one.projections(module)
    query, key, value = (
        F.linear(x, *projections[name])
        .unflatten(-1, (sizes.heads, -1))
        .permute(1, 2, 0, 3)
        for name, x in zip(projections, query_key_value(one, arguments), strict=False)
    )
    with sdpa_kernel(SDPBackend.MATH):
        context = F.scaled_dot_product_attention(
            query, key, value, mask.permute(2, 0, 1).unsqueeze(1)
        )
    context = context.permute(2, 0, 1, 3).flatten(-2)
    return F.linear(context, *projections["output"])


def output_bias(one: Implementation, module: nn.Module) -> Tensor:
    """The output of a query that may attend to nothing."""
    weight, bias = one.projections(module)["output"]
    return weight.new_zeros(len(weight)) if bias is None else bias


def with_gradients(inputs: dict[str, Tensor]) -> list[Tensor]:
    """The inputs as leaves of the graph."""
    return [x.requires_grad_() for x in inputs.values()]


# What they compute


@settings(max_examples=15)
@given(data=st.data())
@each(is_core=True)
def test_output_and_weights_are_those_of_the_loops(
    one: Implementation, data: st.DataObject
) -> None:
    names = ("q_len", "k_len", "batch_size", "heads", "d_k", "d_in")
    sizes = one.sizes(**{n: data.draw(st.integers(1, 5), label=n) for n in names})
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]), label="dtype")
    bias = data.draw(st.booleans(), label="bias")
    masked = data.draw(st.booleans(), label="masked")
    torch.manual_seed(data.draw(st.integers(0, 2**31), label="seed"))

    module = one.build(sizes, bias=bias).to(dtype).eval()
    mask = one.some_mask(sizes)
    if one.takes_mask and not masked:
        mask = torch.ones_like(mask)
    restricted = one.restrict(mask if masked else None)
    arguments = one.inputs(sizes, dtype=dtype) | restricted
    output = one.output_of(module(**arguments))
    expected, weights = by_loops(one, module, sizes, arguments, mask)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-12  # values reach 10
    assert output.dtype == dtype
    close = {"rtol": 0, "atol": tolerance}
    output = one.sequence_first(output).double()
    torch.testing.assert_close(output, expected, **close)
    if one.has_dropout:
        shown = one.weights(module, arguments).double()
        torch.testing.assert_close(shown, weights, **close)


@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
@each(is_core=True)
def test_output_and_gradients_are_those_of_torch(
    device: torch.device, one: Implementation, masked: bool
) -> None:
    sizes = one.sizes()
    module = one.build(sizes).to(device, torch.float64).eval()
    inputs = one.inputs(sizes, dtype=torch.float64, device=device)
    mask = one.some_mask(sizes).to(device)
    if one.takes_mask and not masked:
        mask = torch.ones_like(mask)
    arguments = inputs | one.restrict(mask if masked else None)
    variables = [*with_gradients(inputs), *module.parameters()]

    expected = by_torch(one, module, sizes, arguments, mask)
    upstream = torch.randn_like(expected)
    # No step of the backward pass makes a NaN, not even one that a later step drops.
    with torch.autograd.set_detect_anomaly(True):
        output = one.sequence_first(one.output_of(module(**arguments)))
        ours = torch.autograd.grad(output, variables, upstream)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    theirs = torch.autograd.grad(expected, variables, upstream)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=1e-11)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@each(can_be_causal=True)
def test_future_tokens_cannot_leak(
    device: torch.device, one: Implementation, training: bool
) -> None:
    sizes = one.sizes(q_len=7)
    module = one.build(sizes).to(device).train(training)
    inputs = one.inputs(sizes, device=device)
    causal = torch.ones(7, 7, device=device).bool().tril().unsqueeze(-1)
    restricted = one.restrict(causal.expand(-1, -1, sizes.batch_size))
    before = one.sequence_first(one.output_of(module(**inputs, **restricted)))
    for t in range(7):
        changed = {name: x.clone() for name, x in inputs.items()}
        for x in changed.values():
            one.sequence_first(x)[t] += 1
        result = one.output_of(module(**changed, **restricted))
        same = (one.sequence_first(result) == before).all(dim=2).all(dim=1)
        assert same.tolist() == [i < t for i in range(7)]


@each(has_dropout=True)
def test_a_masked_key_has_weight_zero_and_an_allowed_one_has_not(
    device: torch.device, one: Implementation
) -> None:
    sizes = one.sizes()
    module = one.build(sizes).to(device)
    mask = one.some_mask(sizes).to(device)
    arguments = one.inputs(sizes, device=device) | one.restrict(mask)
    weights = one.weights(module, arguments)
    assert weights.shape == (sizes.q_len, 7, 3, sizes.heads)
    assert torch.equal(weights > 0, mask.unsqueeze(-1).expand_as(weights))


@each(takes_integer_mask=True)
def test_a_mask_means_the_same_in_every_dtype(
    device: torch.device, one: Implementation
) -> None:
    sizes = one.sizes()
    module = one.build(sizes).to(device).eval()
    inputs = one.inputs(sizes, device=device)
    mask = one.some_mask(sizes).to(device)
    expected = one.output_of(module(**inputs, **one.restrict(mask)))
    for dtype in (torch.uint8, torch.int32, torch.int64):
        restricted = one.restrict(mask.to(dtype))
        assert torch.equal(one.output_of(module(**inputs, **restricted)), expected)


@each(divides_width=True, is_blockwise=False, is_core=True)
def test_the_products_cost_the_same_with_any_number_of_heads(
    one: Implementation,
) -> None:
    lengths = {"q_len": 16, "k_len": 16, "batch_size": 1}
    for heads in (1, 2, 8):
        sizes = one.sizes(**lengths, heads=heads, d_k=128 // heads, d_in=128)
        module = one.build(sizes)
        arguments = one.inputs(sizes) | one.restrict(None)
        with FlopCounterMode(display=False) as counter:
            module(**arguments)
        # Four projections, scores and context; each product has a sum.
        assert counter.get_total_flops() == 2 * (4 * 16 * 128**2 + 2 * 16**2 * 128)


# Scores of any size


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float32, 1e3), (torch.float32, 1e15), (torch.float16, 244.0)],
    ids=str,
)
@each(can_mask=True, equal_values_pass=True)
def test_no_true_score_is_so_low_that_a_masked_key_wins(
    device: torch.device, one: Implementation, dtype: torch.dtype, size: float
) -> None:
    sizes = one.sizes(q_len=2, k_len=2, batch_size=1, heads=1, d_k=1, d_in=1)
    module = one.build(sizes, bias=False).to(device, dtype)
    with torch.no_grad():
        for name, (weight, bias) in one.projections(module).items():
            weight.fill_(-1 if name == "key" else 1)
            if bias is not None:
                bias.zero_()
    # The first token meets itself with a score of -size², the second with -size.
    inputs = one.inputs(sizes, device=device, dtype=dtype)
    for x in inputs.values():
        one.sequence_first(x).copy_(torch.tensor([size, 1.0]).view(2, 1, 1))
    mask = torch.tensor([[True, False], [True, False]], device=device).unsqueeze(-1)
    output = one.output_of(module(**inputs, **one.restrict(mask)))
    assert one.sequence_first(output)[0].item() == torch.tensor(size, dtype=dtype)


@HALF
@each(equal_values_pass=True)
def test_large_scores_stay_finite_in_half_precision(
    device: torch.device, one: Implementation, dtype: torch.dtype
) -> None:
    sizes = one.sizes(heads=1, d_k=64, d_in=64)
    module = one.build(sizes).to(device, dtype).eval()
    with torch.no_grad():
        for weight, bias in one.projections(module).values():
            weight.copy_(torch.eye(64))
            if bias is not None:
                bias.zero_()
    # q · k is 64 · 40 · 40 = 102,400, beyond the end of float16; over √64 it is not.
    assert torch.finfo(torch.float16).max == 65_504
    inputs = one.inputs(sizes, device=device, dtype=dtype)
    for x in inputs.values():
        x.fill_(40)
    mask = one.some_mask(sizes).to(device)
    output = one.output_of(module(**inputs, **one.restrict(mask)))
    torch.testing.assert_close(
        output.float(), torch.full_like(output, 40).float(), rtol=0.01, atol=0
    )


@HALF
@each()
def test_half_precision_and_autocast_stay_close(
    device: torch.device, one: Implementation, dtype: torch.dtype
) -> None:
    sizes = one.sizes()
    module = one.build(sizes).to(device).eval()
    inputs = one.inputs(sizes, device=device)
    restricted = one.restrict(one.some_mask(sizes).to(device))
    expected = one.output_of(module(**inputs, **restricted))
    half = {name: x.to(dtype) for name, x in inputs.items()}
    first = next(iter(inputs))
    with torch.autocast(device.type, dtype=dtype):
        automatic = module(**inputs, **restricted)
        mixed = module(**inputs | {first: half[first]}, **restricted)
    for result in (automatic, mixed, module.to(dtype)(**half, **restricted)):
        output = one.output_of(result)
        assert output.dtype == dtype
        torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0.3)


# Dropout


@each(has_dropout=True)
def test_dropout_acts_on_the_weights_and_only_in_training(
    device: torch.device, one: Implementation
) -> None:
    sizes = one.sizes()
    module = one.build(sizes, dropout=0.5).to(device)
    arguments = one.inputs(sizes, device=device) | one.restrict(None)
    one_call, another = (one.output_of(module(**arguments)) for _ in range(2))
    assert not torch.equal(one_call, another)
    in_training = one.weights(module, arguments)
    module.eval()
    one_call, another = (one.output_of(module(**arguments)) for _ in range(2))
    assert torch.equal(one_call, another)
    # What is shown is what dropout acts on, so that rows sum to 1 in training, too.
    torch.testing.assert_close(in_training, one.weights(module, arguments))


@each(has_dropout=True)
def test_dropout_leaves_only_the_output_bias_where_every_weight_is_dropped(
    device: torch.device, one: Implementation
) -> None:
    sizes = one.sizes()
    module = one.build(sizes, dropout=1.0).to(device)
    arguments = one.inputs(sizes, device=device) | one.restrict(None)
    output = one.output_of(module(**arguments))
    assert torch.equal(output, output_bias(one, module).expand_as(output))


# Fully masked rows, and tensors without elements


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
@each(takes_mask=True)
def test_a_fully_masked_row_gives_zero_and_finite_gradients(
    device: torch.device, one: Implementation, dtype: torch.dtype
) -> None:
    sizes = one.sizes()
    module = one.build(sizes).to(device, dtype)
    inputs = one.inputs(sizes, device=device, dtype=dtype)
    variables = with_gradients(inputs)
    mask = one.some_mask(sizes).to(device)
    mask[:, :, 1] = False  # batch item 1 altogether
    if one.mask_per_query:
        mask[3] = False  # query 3 of every batch item
    arguments = inputs | one.restrict(mask)
    if one.has_dropout:
        weights = one.weights(module, arguments)
        allowed = mask.any(dim=1).unsqueeze(-1).expand(-1, -1, sizes.heads)
        assert torch.equal(weights.any(dim=1), allowed)
    with torch.autograd.set_detect_anomaly(True):
        output = one.output_of(module(**arguments))
        output.float().square().mean().backward()
    rows = one.sequence_first(output)[~mask.any(dim=1)]
    assert torch.equal(rows, output_bias(one, module).expand_as(rows))
    for variable in [*variables, *module.parameters()]:
        assert variable.grad is not None
        assert variable.grad.isfinite().all()


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@each(takes_mask=True)
def test_a_key_that_no_query_may_attend_to_may_hold_anything(
    device: torch.device, one: Implementation, junk: float
) -> None:
    sizes = one.sizes()
    module = one.build(sizes).to(device)
    clean = one.inputs(sizes, device=device)
    mask = one.some_mask(sizes).to(device)
    mask[:, 4:, 1] = False
    fully_masked = ~mask.any(dim=0)
    assert fully_masked[4:, 1].all()
    results = []
    for fill in (0.0, junk):
        inputs = {name: x.clone() for name, x in clean.items()}
        for x in list(inputs.values())[1:]:  # keys and values
            one.sequence_first(x)[fully_masked] = fill
        before = {name: x.clone() for name, x in inputs.items()}
        module.zero_grad()
        output = one.output_of(module(**inputs, **one.restrict(mask)))
        output.square().sum().backward()
        results.append([output, *(p.grad for p in module.parameters())])
        for name, x in inputs.items():
            torch.testing.assert_close(x, before[name], rtol=0, atol=0, equal_nan=True)
    for with_zero, with_junk in zip(*results, strict=True):
        assert with_zero.isfinite().all()
        torch.testing.assert_close(with_junk, with_zero, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("q_len", "k_len", "batch_size"),
    [(0, 7, 3), (5, 0, 3), (5, 7, 0), (0, 0, 3), (0, 0, 0)],
)
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
@each()
def test_empty_sequences_and_batches_work(
    device: torch.device,
    one: Implementation,
    q_len: int,
    k_len: int,
    batch_size: int,
    masked: bool,
) -> None:
    sizes = one.sizes(q_len=q_len, k_len=k_len, batch_size=batch_size)
    module = one.build(one.sizes()).to(device)
    inputs = one.inputs(sizes, device=device)
    mask = one.some_mask(sizes).to(device) if masked else None
    output = one.output_of(module(**inputs, **one.restrict(mask)))
    bias = output_bias(one, module)
    assert one.sequence_first(output).shape == (
        sizes.q_len,
        sizes.batch_size,
        len(bias),
    )
    if not k_len:
        assert torch.equal(output, bias.expand_as(output))
    output.sum().backward()


# Copies and checkpoints


@each()
def test_copies_and_pickles_after_training_give_the_same(
    device: torch.device, one: Implementation
) -> None:
    sizes = one.sizes()
    module = one.build(sizes, dropout=0.1).to(device)
    arguments = one.inputs(sizes, device=device)
    arguments |= one.restrict(one.some_mask(sizes).to(device))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    one.output_of(module(**arguments)).square().mean().backward()
    optimizer.step()
    module.eval()
    expected = one.output_of(module(**arguments))

    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    loaded = one.build(sizes).to(device).eval()
    loaded.load_state_dict(module.state_dict(), strict=True)
    copies = [
        loaded,
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(buffer, weights_only=False),
    ]
    names = [name for name, _ in module.named_parameters()]
    for twin in copies:
        assert list(twin.state_dict()) == names
        assert torch.equal(one.output_of(twin(**arguments)), expected)
        disturb(twin)
        assert not torch.equal(one.output_of(twin(**arguments)), expected)
    assert torch.equal(one.output_of(module(**arguments)), expected)


def disturb(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += torch.randn_like(parameter)


# What they work under


@pytest.mark.slow
@each(is_core=True)
def test_compiles_whole_and_at_most_twice_for_all_lengths(
    device: torch.device, one: Implementation
) -> None:
    torch.compiler.reset()
    module = one.build(one.sizes()).to(device, torch.float64).eval()
    # What follows the trace is compared by the law `compiled`, in test_checker.py.
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)

    def compare(sizes: Sizes, mask: Tensor | None) -> None:
        inputs = one.inputs(sizes, device=device, dtype=torch.float64)
        arguments = inputs | one.restrict(mask)
        variables = with_gradients(inputs)
        results = []
        for call in (compiled, module):
            output = one.output_of(call(**arguments))
            gradients = torch.autograd.grad(output.square().sum(), variables)
            results.append([output, *gradients])
        torch.testing.assert_close(*results)

    for length in [7] if one.is_blockwise else [4, 5, 6, 7]:
        sizes = one.sizes(q_len=length, k_len=length)
        mask = one.some_mask(sizes).to(device)
        # The second length is compiled again in any case.
        as_integers = one.takes_integer_mask and length == 4
        compare(sizes, mask.int() if as_integers else mask)
    assert counter.frame_count <= 2
    if one.takes_mask:
        compare(sizes, mask & False)
        compare(sizes, None)


@pytest.mark.slow
@each(is_core=False)
def test_a_variant_is_one_graph(device: torch.device, one: Implementation) -> None:
    torch.compiler.reset()
    sizes = one.sizes()
    module = one.build(sizes).to(device).eval()
    arguments = one.inputs(sizes, device=device)
    arguments |= one.restrict(one.some_mask(sizes).to(device))
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    output = one.output_of(compiled(**arguments))
    torch.testing.assert_close(output, one.output_of(module(**arguments)))


# A strict export is traced as `torch.compile` does it, in the test above.
@pytest.mark.slow
@each(is_blockwise=False)
def test_exports_with_dynamic_lengths_and_batch(
    device: torch.device, one: Implementation
) -> None:
    if isinstance(one, ValidLens) and TorchVersion(torch.__version__) < "2.12":
        pytest.skip("PyTorch 2.11 does not see that min(11 n, 22 n) is 11 n")
    sizes = one.sizes()
    module = one.build(sizes).to(device).eval()
    arguments = one.inputs(sizes, device=device)
    arguments |= one.restrict(one.some_mask(sizes).to(device))
    # The sizes are pairwise distinct: each axis can be told by its size.
    dims = {
        sizes.q_len: torch.export.Dim("q_len", min=2, max=CONTEXT_LENGTH - 1),
        sizes.k_len: torch.export.Dim("k_len", min=2, max=CONTEXT_LENGTH - 1),
    }
    if sizes.batch_size > 1:
        dims[sizes.batch_size] = torch.export.Dim("batch_size", min=2)
    dynamic = {
        name: {axis: dims[n] for axis, n in enumerate(x.shape) if n in dims}
        for name, x in arguments.items()
    }
    program = torch.export.export(
        module, args=(), kwargs=arguments, dynamic_shapes=dynamic, strict=False
    )
    sizes = one.sizes(q_len=11, k_len=13, batch_size=17)
    other = one.inputs(sizes, device=device)
    other |= one.restrict(one.some_mask(sizes).to(device))
    torch.testing.assert_close(
        one.output_of(program.module()(**other)), one.output_of(module(**other))
    )


@pytest.mark.filterwarnings(VMAP_IS_SLOW)
@each(is_blockwise=False)
def test_vmap_gives_what_a_loop_gives(
    device: torch.device, one: Implementation
) -> None:
    sizes = one.sizes()
    module = one.build(sizes).to(device, torch.float64).eval()
    calls = [
        one.inputs(sizes, dtype=torch.float64, device=device)
        | one.restrict(one.some_mask(sizes).to(device))
        for _ in range(2)
    ]
    stacked = {name: torch.stack([call[name] for call in calls]) for name in calls[0]}
    outputs = torch.func.vmap(lambda arguments: one.output_of(module(**arguments)))(
        stacked
    )
    for call, output in zip(calls, outputs, strict=True):
        torch.testing.assert_close(output, one.output_of(module(**call)))


@pytest.mark.slow
@each(is_core=True)
def test_first_and_second_derivatives_are_those_of_finite_differences(
    device: torch.device, one: Implementation
) -> None:
    sizes = one.sizes(q_len=2, k_len=3, batch_size=2, heads=2, d_k=3, d_in=4)
    module = one.build(sizes).to(device, torch.float64).eval()
    inputs = one.inputs(sizes, device=device, dtype=torch.float64)
    mask = one.some_mask(sizes).to(device)
    if one.takes_mask:
        mask[:, :, 1] = False
    restricted = one.restrict(mask)

    def function(*inputs_of_it: Tensor) -> Tensor:
        named = dict(zip(inputs, inputs_of_it, strict=True))
        return one.output_of(module(**named, **restricted))

    variables = tuple(with_gradients(inputs))
    assert torch.autograd.gradcheck(function, variables)
    assert torch.autograd.gradgradcheck(function, variables, fast_mode=True)


@each()
def test_shapes_can_be_found_without_any_data(one: Implementation) -> None:
    sizes = one.sizes()
    module = one.build(sizes).to("meta")
    mask = one.some_mask(sizes).to("meta")
    kinds = [mask, mask.int()] if one.takes_integer_mask else [mask]
    for kind in kinds:
        arguments = one.inputs(sizes, device="meta") | one.restrict(kind)
        output = one.sequence_first(one.output_of(module(**arguments)))
        width = sizes.heads * sizes.d_k
        assert output.shape == (sizes.q_len, sizes.batch_size, width)


@each()
def test_inputs_masks_and_parameters_are_left_alone(
    device: torch.device, one: Implementation
) -> None:
    sizes = one.sizes()
    module = one.build(sizes, dropout=0.5).to(device)
    # Views of larger tensors: writing through them would be seen, too.
    inputs = one.inputs(sizes, device=device)
    inputs = {name: x.mT.contiguous().mT for name, x in inputs.items()}
    arguments = inputs | one.restrict(one.some_mask(sizes).to(device))
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    before = {name: x.clone() for name, x in (arguments | state).items()}
    one.output_of(module(**arguments)).sum().backward()
    for name, x in (arguments | state).items():
        assert torch.equal(x, before[name]), name


# What they refuse


@each(checks_its_arguments=True)
def test_impossible_settings_are_refused(one: Implementation) -> None:
    good = one.settings(one.sizes(), True, 0.1)
    cases: list[tuple[str, Any, str]] = []
    for name, value in good.items():
        if type(value) is int:
            for bad in (0, -4, 2.0, True, "2"):
                cases.append((name, bad, "must be an int from 1 up"))
        elif type(value) is float:
            for bad in (1.5, -0.1, "0.1", True, math.nan):
                cases.append((name, bad, "must lie between 0 and 1"))
    for name, bad, what in cases:
        message = f"^{re.escape(f'`{name}` (={bad!r}) {what}')}$"
        with pytest.raises(ValueError, match=message):
            one.kind(**good | {name: bad})


@each(checks_its_arguments=True, divides_width=True)
def test_heads_that_do_not_divide_the_width_are_refused(one: Implementation) -> None:
    width, heads = one.width_and_heads
    good = one.settings(one.sizes(), True, 0.1)
    for number, way_out in ((10, "8 and 16 would do"), (1000, "512 would do")):
        message = (
            f"`{width}` (=512) must be divisible by `{heads}` (={number}); {way_out}"
        )
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            one.kind(**good | {width: 512, heads: number})


@each(checks_its_arguments=True)
def test_an_input_of_another_kind_is_refused_before_any_work(
    one: Implementation,
) -> None:
    sizes = one.sizes()
    module = one.build(sizes)
    worked: list[nn.Module] = []
    for part in module.modules():
        part.register_forward_hook(lambda part, *_: worked.append(part))
    good = one.inputs(sizes) | one.restrict(None)
    for name, x in one.inputs(sizes).items():
        cases: list[tuple[Any, type[Exception], str]] = [
            (x.tolist(), TypeError, "must be a tensor, but is a list"),
            (None, TypeError, "must be a tensor, but is a NoneType"),
            (
                x.to_sparse(),
                TypeError,
                "is sparse, nested or quantized; pass a dense one",
            ),
            (
                x.to("meta"),
                ValueError,
                rf"is on meta, (the module|not) on cpu; use `{name}\.to\('cpu'\)`",
            ),
        ]
        for wrong, error, message in cases:
            with pytest.raises(error, match=f"^`{name}` {message}$"):
                module(**good | {name: wrong})
        for dtype in (torch.float64, torch.int64):
            message = (
                rf"^`{name}` is {dtype}, (the module|not) torch\.float32; use "
                rf"`{name}\.to\(torch\.float32\)`(, or give the module its dtype)?$"
            )
            # Autocast casts neither of them.
            for autocast in (False, True):
                with (
                    torch.autocast("cpu", enabled=autocast),
                    pytest.raises(TypeError, match=message),
                ):
                    module(**good | {name: x.to(dtype)})
    assert not worked


# A causal mask of a fixed size


@each(has_context_length=True)
def test_more_tokens_than_the_context_length_are_refused(one: Implementation) -> None:
    good = one.settings(one.sizes(), True, 0.0)
    for context_length in (1, CONTEXT_LENGTH):
        module = one.kind(**good | {"context_length": context_length})
        # The original's mask of one zero would broadcast over all scores, and block
        # nothing.
        x = one.inputs(one.sizes(k_len=context_length + 1))["x"]
        message = (
            f"`x` has {context_length + 1} tokens, more than `context_length` "
            f"(={context_length}); keep the last with `x[:, -{context_length}:]`"
        )
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            module(x)
        assert module(x[:, -context_length:]).shape[1] == context_length


@pytest.mark.parametrize("block_size", [1, CONTEXT_LENGTH, 1024])
@each(has_context_length=True)
def test_a_checkpoint_with_a_stored_mask_of_any_size_loads_strictly(
    device: torch.device, one: Implementation, block_size: int
) -> None:
    sizes = one.sizes()
    module, other = (one.build(sizes).to(device) for _ in range(2))
    # The original stores a float32 mask before the weights of each head.
    checkpoint: dict[str, Tensor] = {}
    for name, tensor in other.state_dict().items():
        head = name.partition("W_")[0] if "W_" in name else ""
        checkpoint.setdefault(f"{head}mask", torch.ones(block_size, block_size).triu(1))
        checkpoint[name] = tensor
    names = list(checkpoint)
    inside = nn.ModuleDict({"block": nn.Sequential(copy.deepcopy(module))})
    inside.load_state_dict({f"block.0.{name}": x for name, x in checkpoint.items()})
    module.load_state_dict(checkpoint, strict=True)
    assert list(checkpoint) == names
    assert list(module.state_dict()) == [n for n in names if "mask" not in n]
    arguments = one.inputs(sizes, device=device)
    for loaded in (module, inside["block"][0]):
        assert torch.equal(loaded(**arguments), other(**arguments))
        for name, mask in loaded.named_buffers():
            assert name.endswith("mask")
            assert mask.dtype == torch.bool
            for i in range(CONTEXT_LENGTH):
                assert mask[i].tolist() == [j > i for j in range(CONTEXT_LENGTH)]


@pytest.mark.parametrize("assign", [False, True], ids=["to_empty", "assign"])
@each(has_context_length=True)
def test_a_module_built_on_meta_gets_its_mask_with_its_weights(
    device: torch.device, one: Implementation, assign: bool
) -> None:
    sizes = one.sizes()
    module = one.build(sizes).to(device)
    with torch.device("meta"):
        late = one.build(sizes)
    if not assign:
        # What `to_empty` does where zeros have been lying in memory.
        late = late._apply(lambda x: torch.zeros_like(x, device=device))
        pairs = zip(late.buffers(), module.buffers(), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    late.load_state_dict(module.state_dict(), assign=assign)
    arguments = one.inputs(sizes, device=device)
    assert torch.equal(late(**arguments), module(**arguments))
