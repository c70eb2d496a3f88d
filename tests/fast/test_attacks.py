"""Whatever a program does to a module, `fast` computes what the core computes.

The core is the reference, in float64 where the case allows it. Lengths of 5 and 151
take the formula and the fused or blockwise kernels, at their real sizes.
"""

import copy
import math
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch import multiprocessing as mp
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations, prune

from headnotes import fast, mha

HEADS, D_K, BATCH = 3, 7, 2
D_MODEL = HEADS * D_K
LENGTHS = [5, 151]
PERFORMANCE_DROP = "ignore:There is a performance drop:UserWarning"


def pair(
    dtype: torch.dtype = torch.float64, dropout_prob: float = 0.0, **settings: Any
) -> tuple[Any, Any]:
    """The core and `fast`, with the same weights; rows of attention differ."""
    core = mha.MultiHeadAttention(HEADS, D_MODEL, dropout_prob, **settings).to(dtype)
    for parameter in core.parameters():
        nn.init.normal_(parameter, std=0.4)
    module = fast.MultiHeadAttention(HEADS, D_MODEL, dropout_prob, **settings).to(dtype)
    module.load_state_dict(core.state_dict())
    return core, module


def sequence(seq_len: int, dtype: torch.dtype = torch.float64, **like: Any) -> Tensor:
    return torch.randn(seq_len, BATCH, D_MODEL, dtype=dtype, **like)


def self_attention(module: Any, x: Tensor, **options: Any) -> Any:
    return module(query=x, key=x, value=x, **options)


def past(seq_len: int) -> Tensor:
    return torch.ones(seq_len, seq_len).bool().tril().unsqueeze(-1)


def masks_of(seq_len: int) -> Iterator[tuple[dict[str, Any], Tensor | None]]:
    """The options of `fast`, and the mask that says the same to the core."""
    mask = torch.rand(seq_len, seq_len, BATCH) < 0.6
    mask[1] = False  # a fully masked row
    padding = torch.ones(1, seq_len, BATCH).bool()
    padding[:, -2:, 1] = False
    yield {}, None
    yield {"is_causal": True}, past(seq_len)
    yield {"mask": mask}, mask
    yield {"mask": padding}, padding
    yield {"mask": mask, "is_causal": True}, mask & past(seq_len)


def assert_same(core: Any, module: Any, x: Tensor) -> None:
    """In training, in inference, with weights returned, and while decoding."""
    tolerance = {"rtol": 1e-9, "atol": 1e-9}
    close = torch.testing.assert_close
    for options, mask in masks_of(len(x)):
        expected = self_attention(core, x, mask=mask)
        close(self_attention(module, x, **options), expected, **tolerance)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                close(self_attention(module, x, **options), expected, **tolerance)
        output, weights = self_attention(module, x, **options, need_weights=True)
        close(output, expected, **tolerance)
        close(weights, core.attn, **tolerance)
    decoded, _ = module.decode(x, module.cache(BATCH, len(x)))
    close(decoded, self_attention(core, x, mask=past(len(x))), **tolerance)


# Weights written without autograd's knowledge ----------------------------------------


def parameters(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters())


def by_data(module: nn.Module) -> None:
    for p in parameters(module):
        p.data.mul_(0.5).add_(0.1)


def by_data_of_one(module: Any) -> None:
    module.value.linear.weight.data.copy_(torch.eye(D_MODEL))


def by_assigning_data(module: nn.Module) -> None:
    for p in parameters(module):
        p.data = p.data * 2


def by_numpy(module: nn.Module) -> None:
    for p in parameters(module):
        p.detach().numpy()[...] *= 1.5


def by_storage(module: nn.Module) -> None:
    for p in parameters(module):
        bytes_of = p.untyped_storage()
        bytes_of.copy_((p.detach() * 3).contiguous().untyped_storage())


def by_detached_alias(module: nn.Module) -> None:
    for p in parameters(module):
        torch.frombuffer(memoryview(p.detach().numpy()).cast("B"), dtype=p.dtype).mul_(
            0.25
        )


def by_fused_optimizer(module: nn.Module) -> None:
    for p in parameters(module):
        p.grad = torch.ones_like(p)
    torch.optim.AdamW(module.parameters(), lr=0.1, fused=True).step()


def by_foreach(module: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(parameters(module), 0.5)


def by_averaging(module: nn.Module) -> None:
    average = torch.optim.swa_utils.AveragedModel(module)
    for change in (by_data, by_clipping):
        change(module)
        average.update_parameters(module)
    for p, mean in zip(parameters(module), average.module.parameters(), strict=True):
        p.data.copy_(mean.data)


def by_vector(module: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(module.parameters())
    nn.utils.vector_to_parameters(vector.detach() * 0.5, module.parameters())


def by_clipping(module: nn.Module) -> None:
    for p in parameters(module):
        p.data.clamp_(-0.2, 0.2)


def by_swapping(module: nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        state = {name: 2 * t for name, t in module.state_dict().items()}
        module.load_state_dict(state)
        module.to(torch.float32).to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def halve(module: nn.Module) -> None:
    """What another process does to shared weights."""
    for p in parameters(module):
        p.data.mul_(0.5)


def by_another_process(module: nn.Module) -> None:
    module.share_memory()
    process = mp.get_context("fork").Process(target=halve, args=(module,))
    process.start()
    process.join()
    assert process.exitcode == 0


WRITERS = [
    by_data,
    by_data_of_one,
    by_assigning_data,
    by_numpy,
    by_storage,
    by_detached_alias,
    by_fused_optimizer,
    by_foreach,
    by_averaging,
    by_vector,
    by_clipping,
    by_swapping,
    by_another_process,
]


@pytest.mark.parametrize("seq_len", LENGTHS)
@pytest.mark.parametrize("write", WRITERS)
def test_any_write_to_a_weight_takes_effect(
    write: Callable[[nn.Module], None], seq_len: int
) -> None:
    core, module = pair()
    x = sequence(seq_len)
    core.eval(), module.eval()
    with torch.no_grad():
        before = self_attention(module, x)
    write(module)
    core.load_state_dict(module.state_dict())
    with torch.no_grad():
        after = self_attention(module, x)
        assert not torch.allclose(before, after)
        torch.testing.assert_close(after, self_attention(core, x))
    assert_same(core, module, x)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone, that meets in a file."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("wrap", ["DistributedDataParallel", "broadcast", "FSDP1"])
def test_weights_of_a_process_group_are_the_current_ones(
    wrap: str, process_group: None
) -> None:
    core, module = pair()
    x = sequence(5)
    with torch.no_grad():
        self_attention(module, x)
    if wrap == "broadcast":
        for p in parameters(module):
            p.data.add_(0.3)
            dist.broadcast(p, src=0)
        wrapped = module
    elif wrap == "DistributedDataParallel":
        wrapped = nn.parallel.DistributedDataParallel(module)
        self_attention(wrapped, x).square().sum().backward()
        torch.optim.SGD(module.parameters(), lr=0.1, fused=True).step()
    else:
        from torch.distributed import fsdp

        # All parameters become views of one flat parameter.
        shard = fsdp.FullyShardedDataParallel
        wrapped = shard(module, device_id=torch.device("cpu"), use_orig_params=True)
        self_attention(wrapped, x).square().sum().backward()
        torch.optim.SGD(wrapped.parameters(), lr=0.1).step()
    core.load_state_dict(
        {
            n.replace("_fsdp_wrapped_module.", ""): p
            for n, p in module.named_parameters()
        }
    )
    with torch.no_grad():
        torch.testing.assert_close(
            self_attention(wrapped, x), self_attention(core, x), rtol=1e-9, atol=1e-9
        )


def test_weights_that_are_no_parameters_bring_gradients() -> None:
    # Meta-learning: the weights of the inner loop are functions of others.
    core, module = pair()
    x = sequence(5)
    rate = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    gradients = []
    for each in (core, module):
        names, weights = zip(*each.named_parameters(), strict=True)
        loss = self_attention(each, x).square().mean()
        steps = torch.autograd.grad(loss, weights, create_graph=True)
        inner = {n: w - rate * g for n, w, g in zip(names, weights, steps, strict=True)}
        arguments = {"query": x, "key": x, "value": x}
        output = torch.func.functional_call(each, inner, (), arguments)
        gradients.append(torch.autograd.grad(output.square().mean(), [rate, *weights]))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


# Replaced submodules -----------------------------------------------------------------


class Doubled(nn.Linear):
    """A projection with a `forward` of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def instance_forward(module: Any) -> None:
    linear = module.key.linear
    linear.forward = lambda x: 3 * nn.Linear.forward(linear, x)


def subclassed(module: Any) -> None:
    for part in (module.query, module.value):
        other = Doubled(D_MODEL, D_MODEL).double()
        other.load_state_dict(part.linear.state_dict())
        part.linear = other
    other = Doubled(D_MODEL, D_MODEL).double()
    other.load_state_dict(module.output.state_dict())
    module.output = other


def low_rank(module: Any) -> None:
    """An adapter in the manner of LoRA."""
    linear = module.value.linear

    class Adapted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            ones = torch.ones(D_MODEL, 1, dtype=x.dtype)
            return super().forward(x) + x @ ones @ ones.T

    other = Adapted(D_MODEL, D_MODEL).double()
    other.load_state_dict(linear.state_dict())
    module.value.linear = other


def parametrized(module: Any) -> None:
    torch.manual_seed(3)
    for part in (module.query, module.key, module.value):
        parametrizations.weight_norm(part.linear)
        parametrizations.spectral_norm(part.linear).eval()


def pruned(module: Any) -> None:
    torch.manual_seed(5)
    prune.random_unstructured(module.key.linear, "weight", amount=0.5)


def without_output_bias(module: Any) -> None:
    module.output.bias = None


def without_any_bias(module: Any) -> None:
    for part in (module.query, module.key, module.value):
        part.linear.bias = None
    module.output.bias = None


def hooked(module: Any) -> None:
    module.query.linear.register_forward_hook(lambda part, x, y: 2 * y)
    module.value.register_forward_pre_hook(lambda part, x: (x[0] + 1,))
    module.output.register_forward_hook(lambda part, x, y: y - 1)


class Scaled(Tensor):
    """A tensor subclass whose values are half of what operators see."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def unwrap(x: Any) -> Any:
            return 2 * x.as_subclass(Tensor) if isinstance(x, Scaled) else x

        if function is nn.functional.linear:
            return function(*(unwrap(x) for x in args), **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs or {})


def of_a_tensor_subclass(module: Any) -> None:
    weight = module.key.linear.weight
    del module.key.linear._parameters["weight"]
    module.key.linear.weight = weight.detach().as_subclass(Scaled)


REPLACEMENTS = [
    instance_forward,
    subclassed,
    low_rank,
    parametrized,
    pruned,
    without_output_bias,
    without_any_bias,
    hooked,
    of_a_tensor_subclass,
]


@pytest.mark.slow
@pytest.mark.parametrize("seq_len", LENGTHS)
@pytest.mark.parametrize("replace", REPLACEMENTS)
def test_a_replaced_part_is_used(replace: Callable[[Any], None], seq_len: int) -> None:
    core, module = pair()
    x = sequence(seq_len)
    with torch.no_grad():
        before = self_attention(module, x)
    for each in (core, module):
        replace(each)
    assert not torch.allclose(self_attention(module, x), before)
    assert_same(core, module, x)


class Identity(nn.Module):
    """A projection that only splits into heads, in float32 even under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float().unflatten(-1, (HEADS, D_K))


@pytest.mark.parametrize("seq_len", LENGTHS)
def test_under_autocast_projections_may_differ_in_dtype(seq_len: int) -> None:
    core, module = pair(torch.float32)
    core.key = module.key = Identity()
    x = sequence(seq_len, torch.float32)
    for options, mask in masks_of(seq_len):
        for mode in (torch.no_grad, torch.enable_grad):
            with mode(), torch.autocast("cpu", dtype=torch.bfloat16):
                output = self_attention(module, x, **options)
                expected = self_attention(core, x, mask=mask)
            assert output.dtype == expected.dtype
            torch.testing.assert_close(output, expected, rtol=0.2, atol=0.2)


class Drop(nn.Module):
    """Another module in dropout's place: it forgets what every query saw of key 2."""

    def forward(self, weights: Tensor) -> Tensor:
        keep = torch.ones(weights.shape[1], dtype=weights.dtype)
        keep[2] = 0
        return weights * keep[:, None, None]


class Quiet(nn.Dropout):
    """A subclass that does something else."""

    def forward(self, weights: Tensor) -> Tensor:
        return weights * 0.5


@pytest.mark.parametrize("seq_len", LENGTHS)
@pytest.mark.parametrize(
    "other",
    [Drop(), Quiet(0.1), nn.Sigmoid(), nn.Identity(), nn.Dropout(0.5).eval()],
    ids=str,
)
def test_any_module_can_replace_dropout(other: nn.Module, seq_len: int) -> None:
    core, module = pair(dropout_prob=0.1)
    core.dropout = module.dropout = other
    assert_same(core, module, sequence(seq_len))


@pytest.mark.parametrize("seq_len", LENGTHS)
def test_a_hook_on_dropout_is_called(seq_len: int) -> None:
    core, module = pair()
    for each in (core, module):
        each.dropout.register_forward_hook(lambda part, x, y: 3 * y)
    assert_same(core, module, sequence(seq_len))


@pytest.mark.parametrize("seq_len", LENGTHS)
def test_a_backward_hook_on_dropout_is_called(seq_len: int) -> None:
    x = sequence(seq_len).requires_grad_()
    gradients = []
    for module in pair():
        module.dropout.register_full_backward_pre_hook(lambda part, y: (3 * y[0],))
        module.dropout.register_full_backward_hook(lambda part, x, y: (2 * x[0],))
        gradients += torch.autograd.grad(self_attention(module, x).sum(), x)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("seq_len", LENGTHS)
@pytest.mark.parametrize("where", ["module", "class", "torch.nn"])
def test_a_patched_dropout_is_called(
    where: str, seq_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "class":
        monkeypatch.setattr(nn.Dropout, "forward", lambda self, weights: weights / 2)
    elif where == "torch.nn":
        monkeypatch.setattr(nn, "Dropout", Quiet)
    core, module = pair()
    if where == "module":
        for each in (core, module):
            each.dropout.forward = lambda weights: weights / 2
    assert_same(core, module, sequence(seq_len))


@pytest.mark.parametrize("seq_len", LENGTHS)
@pytest.mark.parametrize("p", [-0.5, 1.2])
def test_a_dropout_probability_assigned_later_is_checked(
    p: float, seq_len: int
) -> None:
    _, module = pair(dropout_prob=0.1)
    for module.dropout.p in (p, torch.tensor(p)):
        message = rf"^`dropout` \(={p}\d*\) must lie between 0 and 1$"
        with pytest.raises(ValueError, match=message):
            self_attention(module, sequence(seq_len))
    module.dropout.p = torch.tensor(0.5)
    assert self_attention(module, sequence(seq_len)).isfinite().all()


@pytest.mark.parametrize("seq_len", LENGTHS)
def test_a_hook_on_all_modules_is_called(seq_len: int) -> None:
    core, module = pair()
    scaled = nn.Linear, nn.Dropout
    handle = nn.modules.module.register_module_forward_hook(
        lambda part, x, y: 2 * y if isinstance(part, scaled) else None
    )
    try:
        assert_same(core, module, sequence(seq_len))
    finally:
        handle.remove()


class Convolved(nn.Module):
    """A projection that adds to each position the one before it."""

    def __init__(self, projection: nn.Module) -> None:
        super().__init__()
        self.projection = projection

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.projection(x)
        return y + y.roll(1, 0)


def convolve_module(module: Any, name: str) -> None:
    setattr(module, name, Convolved(getattr(module, name)))


def convolve_linear(module: Any, name: str) -> None:
    class ConvolvedLinear(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + super().forward(x.roll(1, 0))

    getattr(module, name).linear.__class__ = ConvolvedLinear


def convolve_by_hook(module: Any, name: str) -> None:
    getattr(module, name).register_forward_hook(lambda part, x, y: y + y.roll(1, 0))


def convolve_instance(module: Any, name: str) -> None:
    linear = getattr(module, name).linear
    forward = nn.Linear.forward
    linear.forward = lambda x: forward(linear, x) + forward(linear, x.roll(1, 0))


@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize(
    "convolve",
    [convolve_module, convolve_linear, convolve_by_hook, convolve_instance],
)
@pytest.mark.parametrize("content", [50.0, math.nan])
def test_projections_that_mix_positions_see_padding_of_zero(
    content: float, convolve: Callable[[Any, str], None], name: str
) -> None:
    core, module = pair()
    query, memory = sequence(5), sequence(11)
    memory[:3, 1] = content
    padding = torch.ones(1, 11, BATCH).bool()
    padding[:, :3, 1] = False
    outputs = []
    for each in (core, module):
        convolve(each, name)
        outputs.append(each(query=query, key=memory, value=memory, mask=padding))
    torch.testing.assert_close(*outputs)


Change = Callable[[Tensor], Tensor]
SHAPES: dict[str, tuple[str, Change, list[list[int]]]] = {
    "one head of queries": (
        "query",
        lambda y: y[:, :, :1],
        [[151, 2, 1, 7], [151, 2, 3, 7], [151, 2, 3, 7]],
    ),
    "one head of keys": (
        "key",
        lambda y: y[:, :, :1],
        [[151, 2, 3, 7], [151, 2, 1, 7], [151, 2, 3, 7]],
    ),
    "one head of values": (
        "value",
        lambda y: y[:, :, :1],
        [[151, 2, 3, 7], [151, 2, 3, 7], [151, 2, 1, 7]],
    ),
    "one batch item": (
        "value",
        lambda y: y[:, :1],
        [[151, 2, 3, 7], [151, 2, 3, 7], [151, 1, 3, 7]],
    ),
    "one more key": (
        "key",
        lambda y: torch.cat([y, y[:1]]),
        [[151, 2, 3, 7], [152, 2, 3, 7], [151, 2, 3, 7]],
    ),
    "narrow keys": (
        "key",
        lambda y: y[..., :5],
        [[151, 2, 3, 7], [151, 2, 3, 5], [151, 2, 3, 7]],
    ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_projections_of_sizes_that_do_not_fit_are_refused(case: str) -> None:
    name, change, shapes = SHAPES[case]
    _, module = pair()
    getattr(module, name).register_forward_hook(lambda part, x, y: change(y))
    seen = "return shapes {}, {} and {}, not".format(*shapes)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode(), pytest.raises(ValueError, match=re.escape(seen)):
            self_attention(module, sequence(151))
    cache = module.cache(BATCH, 151)
    with pytest.raises(ValueError, match=re.escape(seen)):
        module.decode(sequence(151), cache)
    assert len(cache) == 0


@pytest.mark.parametrize("masked", [False, True])
def test_a_projection_without_heads_is_refused(masked: bool) -> None:
    _, module = pair()
    width = module.output.in_features
    module.key = nn.Linear(width, width).double()
    mask = torch.ones(1, 11, 1).bool() if masked else None
    with pytest.raises(ValueError, match=rf"return shapes .*, \[11, 2, {width}\] and "):
        self_attention(module, sequence(11), mask=mask)


def test_a_mask_must_fit_what_the_projections_return() -> None:
    _, module = pair()
    for part in (module.key, module.value):  # every other position
        part.register_forward_hook(lambda part, x, y: y[::2])
    x = sequence(11)
    assert self_attention(module, x).shape == x.shape
    mask = torch.ones(1, 11, 1).bool()
    message = r"\[6, 2, 3, 7\] and \[6, 2, 3, 7\], for a mask of shape \[1, 11, 1\],"
    with pytest.raises(ValueError, match=message):
        self_attention(module, x, mask=mask)


@pytest.mark.parametrize("seq_len", LENGTHS)
def test_the_mode_of_the_dropout_module_decides_alone(seq_len: int) -> None:
    _, module = pair(dropout_prob=0.5)
    x = sequence(seq_len)
    module.eval()
    module.dropout.train()  # Monte Carlo dropout
    assert not torch.equal(self_attention(module, x), self_attention(module, x))
    module.train()
    module.dropout.eval()  # frozen
    assert torch.equal(self_attention(module, x), self_attention(module, x))
    module.train()
    module.dropout.p = 0.0  # scheduled
    assert torch.equal(self_attention(module, x), self_attention(module, x))


@pytest.mark.parametrize("seq_len", LENGTHS)
def test_a_default_device_changes_nothing(seq_len: int) -> None:
    core, module = pair(dropout_prob=0.5)
    x = sequence(seq_len)
    with torch.device("meta"):
        for options, _ in masks_of(seq_len):
            options = {k: v if k == "is_causal" else None for k, v in options.items()}
            assert self_attention(module, x, **options).isfinite().all()
        core.eval(), module.eval()
        expected = self_attention(core, x)
        torch.testing.assert_close(self_attention(module, x), expected)
        decoded, _ = module.decode(x, module.cache(BATCH, seq_len))
    torch.testing.assert_close(decoded, self_attention(core, x, mask=past(seq_len)))


# Numbers -----------------------------------------------------------------------------


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory that nobody has written to holds NaN."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("p", [1.0, 1 - 2**-18, 1 - 2**-26])
@pytest.mark.parametrize("seq_len", LENGTHS)
@pytest.mark.parametrize("need_weights", [False, True])
def test_dropout_of_everything_gives_the_output_bias(
    poisoned_memory: None,
    dtype: torch.dtype,
    p: float,
    seq_len: int,
    need_weights: bool,
) -> None:
    _, module = pair(dtype, dropout_prob=p)
    x = sequence(seq_len, dtype).requires_grad_()
    for options, _ in masks_of(seq_len):
        y = self_attention(module, x, **options, need_weights=need_weights)
        y = y[0] if need_weights else y
        assert torch.equal(y, module.output.bias.expand_as(y))
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert not gradient.any()
        with torch.no_grad():
            y = self_attention(module, x, **options, need_weights=need_weights)
        y = y[0] if need_weights else y
        assert torch.equal(y, module.output.bias.expand_as(y))


@pytest.mark.slow
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("seq_len", [*LENGTHS, 257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("content", [math.nan, 60_000.0, -1e30])
def test_with_one_seed_real_rows_do_not_depend_on_the_padding(
    content: float, seq_len: int, need_weights: bool, dtype: torch.dtype
) -> None:
    _, module = pair(dtype, dropout_prob=0.5)
    clean = sequence(seq_len, dtype)
    padding = torch.ones(1, seq_len, BATCH).bool()
    padding[:, -2:, 1] = False
    for is_causal in (False, True):
        outputs = []
        for x in (clean, clean.clone()):
            if x is not clean:
                x[-2:, 1] = content
            torch.manual_seed(7)
            options = {"mask": padding, "is_causal": is_causal}
            y = self_attention(module, x, **options, need_weights=need_weights)
            outputs.append(y[0] if need_weights else y)
        assert torch.equal(outputs[0][:, 0], outputs[1][:, 0])
        torch.testing.assert_close(outputs[0][:-2, 1], outputs[1][:-2, 1])


@pytest.mark.parametrize("seq_len", LENGTHS)
@pytest.mark.parametrize("content", [1e4, 60_000.0, 1e30, math.nan, math.inf])
@pytest.mark.parametrize("scale", [1.0, 2.0**16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_with_nan_in_padding_are_those_of_the_core(
    content: float, seq_len: int, scale: float, dtype: torch.dtype
) -> None:
    core, module = pair(dtype)
    query, memory = sequence(3, dtype), sequence(seq_len, dtype)
    memory[-2:, 1] = content
    padding = torch.ones(1, seq_len, BATCH).bool()
    padding[:, -2:, 1] = False
    results = []
    for each in (core, module):
        x, y = query.clone().requires_grad_(), memory.clone().requires_grad_()
        output = each(query=x, key=y, value=y, mask=padding)
        loss = (output.float().mean() * scale).to(dtype)
        results.append([output, *torch.autograd.grad(loss, [x, y, *each.parameters()])])
    bound = 2e-2 if dtype == torch.float16 else 1e-4
    for theirs, ours in zip(*results, strict=True):
        theirs, ours = theirs.float(), ours.float()
        torch.testing.assert_close(
            ours, theirs, rtol=bound, atol=bound * scale, equal_nan=True
        )


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("seq_len", LENGTHS)
@pytest.mark.parametrize("content", [1e30, -1e30, math.nan])
@pytest.mark.parametrize("need_weights", [False, True])
def test_a_key_that_overflows_reaches_only_rows_that_may_attend_to_it(
    content: float, seq_len: int, learns: bool, need_weights: bool
) -> None:
    core, module = pair(torch.float32)
    query, value = sequence(seq_len, torch.float32), sequence(seq_len, torch.float32)
    key = query.clone()
    key[3] = content * torch.randn(BATCH, D_MODEL)
    query.requires_grad_(learns)
    for options, mask in masks_of(seq_len):
        if mask is None:
            continue
        expected = core(query=query, key=key, value=value, mask=mask)
        output = module(
            query=query, key=key, value=value, **options, need_weights=need_weights
        )
        output = output[0] if need_weights else output
        rows = ~mask.expand(seq_len, -1, BATCH)[:, 3]
        assert expected[rows].isfinite().all()
        torch.testing.assert_close(output[rows], expected[rows], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("seq_len", LENGTHS)
@pytest.mark.parametrize("method", ["compile", "make_fx", "trace", "export"])
def test_compiled_and_traced_agree_on_nan_and_on_fully_masked_rows(
    method: str, seq_len: int
) -> None:
    torch.compiler.reset()
    _, module = pair()
    module.eval()
    x, dirty = sequence(seq_len), sequence(seq_len)
    dirty[3, 0] = math.nan
    dirty[-1, 1] = math.nan
    mask = torch.rand(seq_len, seq_len, BATCH) < 0.6
    mask[1] = False
    mask[:, -1, 1] = False

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = module

        def forward(self, x: Tensor) -> Any:
            return self_attention(self.attention, x, mask=mask)

    call, other = Masked(), None
    if method == "compile":
        other = torch.compile(call, backend="eager", fullgraph=True)
    elif method == "make_fx":
        other = make_fx(call)(x)
    elif method == "trace":
        with warnings.catch_warnings(action="ignore"):
            other = torch.jit.trace(call, x, check_trace=False)
    else:
        other = torch.export.export(call, (x,)).module()
    for each in (x, dirty):
        torch.testing.assert_close(other(each), call(each), equal_nan=True)
    assert call(dirty).isnan().any()
    assert not call(dirty).isnan().all()


@pytest.mark.filterwarnings(PERFORMANCE_DROP)
@pytest.mark.parametrize("seq_len", LENGTHS)
@pytest.mark.parametrize("randomness", ["error", "same", "different"])
def test_randomness_under_vmap_is_that_of_the_core(
    randomness: str, seq_len: int
) -> None:
    x = sequence(seq_len).expand(3, -1, -1, -1)
    seen = []
    for module in pair(dropout_prob=0.5):
        for options in ({}, {"mask": past(seq_len)}):

            def call(x: Tensor, module: Any = module, options: Any = options) -> Any:
                return self_attention(module, x, **options)

            if randomness == "error":
                with pytest.raises(RuntimeError, match="randomness"):
                    torch.func.vmap(call)(x)
            else:
                each = torch.func.vmap(call, randomness=randomness)(x)
                seen.append(torch.equal(each[0], each[1]))
    assert all(alike == (randomness == "same") for alike in seen)


@pytest.mark.filterwarnings(PERFORMANCE_DROP)
@pytest.mark.parametrize("seq_len", LENGTHS)
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_repeats_dropout_for_inputs_without_a_batch(
    randomness: str, seq_len: int
) -> None:
    # Monte Carlo dropout: many samples for one input.
    x, samples = sequence(seq_len), torch.zeros(3)
    for module in pair(dropout_prob=0.5):

        def sample(_: Tensor, module: Any = module) -> Any:
            return self_attention(module, x)

        y = torch.vmap(sample, randomness=randomness)(samples)
        assert torch.equal(y[0], y[1]) == (randomness == "same")


@pytest.mark.parametrize("seq_len", LENGTHS)
def test_nan_in_a_fully_masked_query_reaches_no_gradient_of_values(
    seq_len: int,
) -> None:
    query, value = sequence(seq_len), sequence(seq_len).requires_grad_()
    query[1, 0] = math.nan
    mask = torch.ones(seq_len, seq_len, BATCH).bool()
    mask[1] = False
    gradients = []
    for module in pair():
        y = module(query=query, key=value.detach(), value=value, mask=mask)
        gradients += torch.autograd.grad(y.sum(), value)
    assert gradients[0].isfinite().all()
    torch.testing.assert_close(*gradients)


class Interleaved(mha.PrepareForMultiHeadAttention):
    """A projection whose heads are the last axis in memory."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x.unflatten(-1, (self.d_k, self.heads)).mT


@pytest.mark.parametrize("seq_len", LENGTHS)
def test_interleaved_heads_are_read_with_their_strides(seq_len: int) -> None:
    scores = fast.Scores(sinks=True)
    settings = {"project": Interleaved, "scores": scores}
    module = fast.MultiHeadAttention(HEADS, D_MODEL, 0.0, **settings).double()
    x = sequence(seq_len)
    options = {"is_causal": True}
    expected, _ = self_attention(module, x, **options, need_weights=True)
    torch.testing.assert_close(self_attention(module, x, **options), expected)
    with torch.no_grad():
        torch.testing.assert_close(self_attention(module, x, **options), expected)
    decoded, _ = module.decode(x, module.cache(BATCH, seq_len))
    torch.testing.assert_close(decoded, expected)


# Derivatives -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.parametrize("seq_len", LENGTHS)
def test_a_linearized_call_is_that_of_the_core(seq_len: int) -> None:
    # PyTorch ended the process here.
    x, direction = sequence(seq_len), sequence(seq_len)
    results = []
    for module in pair():
        y, differential = torch.func.linearize(
            lambda x, module=module: self_attention(module, x), x
        )
        results.append((y, differential(direction)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("kind", ["is_grads_batched", "torch.func"])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("seq_len", LENGTHS)
def test_gradients_may_come_in_batches(
    seq_len: int, need_weights: bool, kind: str
) -> None:
    _, module = pair()
    x = sequence(seq_len).requires_grad_()
    y = self_attention(module, x, is_causal=True, need_weights=need_weights)
    y = y[0] + y[1].sum() if need_weights else y

    def gradient(along: Tensor, **options: Any) -> Tensor:
        return torch.autograd.grad(y, x, along, retain_graph=True, **options)[0]

    along = torch.randn(3, *y.shape, dtype=y.dtype)
    if kind == "torch.func":
        batched = torch.func.vmap(gradient)(along)
    else:
        batched = gradient(along, is_grads_batched=True)
    assert not batched.requires_grad
    expected = torch.stack([gradient(each) for each in along])
    torch.testing.assert_close(batched, expected)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("seq_len", LENGTHS)
@pytest.mark.parametrize("made_in_inference_mode", [False, True])
def test_the_backward_pass_has_a_mask_of_its_own(
    made_in_inference_mode: bool, seq_len: int, is_causal: bool
) -> None:
    _, module = pair()
    x = sequence(seq_len).requires_grad_()
    with torch.inference_mode(made_in_inference_mode):
        mask = torch.rand(seq_len, seq_len, BATCH) < 0.6
    options = {"mask": mask, "is_causal": is_causal}
    loss = self_attention(module, x, **options).sum()
    (expected,) = torch.autograd.grad(loss, x)
    loss = self_attention(module, x, **options).sum()
    if not made_in_inference_mode:
        mask.logical_not_()  # the caller fills it for the next batch
    (gradient,) = torch.autograd.grad(loss, x)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("seq_len", LENGTHS)
def test_a_bias_that_inference_mode_has_left_behind_serves_training(
    seq_len: int,
) -> None:
    table: list[Tensor] = []

    def bias(i: Tensor, j: Tensor) -> Tensor:
        if not table:
            table.append(-(j - i.unsqueeze(1)).abs().unsqueeze(-1).double())
        return table[0]

    scores = fast.Scores(bias=bias)
    module = fast.MultiHeadAttention(HEADS, D_MODEL, 0.0, scores=scores).double()
    x = sequence(seq_len).requires_grad_()
    with torch.inference_mode():
        expected = self_attention(module, x)
    for need_weights in (False, True):
        y = self_attention(module, x, need_weights=need_weights)
        y = y[0] if need_weights else y
        torch.testing.assert_close(y, expected.clone())
        assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("seq_len", LENGTHS)
@pytest.mark.parametrize("of", ["input", "weights"])
@pytest.mark.parametrize("method", ["dual numbers", "torch.func"])
def test_forward_mode_is_that_of_the_core(seq_len: int, of: str, method: str) -> None:
    core, module = pair()
    x = sequence(seq_len)
    at: dict[str, Tensor] = {"x": x}
    if of == "weights":
        at = {name: p.detach() for name, p in core.named_parameters()}
    along = {name: torch.randn_like(t) for name, t in at.items()}

    for options, mask in masks_of(seq_len):
        results = []
        for each, call in ((core, {"mask": mask}), (module, options)):

            def function(at: Any, each: Any = each, call: Any = call) -> Any:
                y = at["x"] if of == "input" else x
                weights = {} if of == "input" else at
                arguments = {"query": y, "key": y, "value": y, **call}
                return torch.func.functional_call(each, weights, (), arguments)

            if method == "torch.func":
                results.append(torch.func.jvp(function, (at,), (along,)))
            else:
                with forward_ad.dual_level():
                    dual = {n: forward_ad.make_dual(at[n], along[n]) for n in at}
                    results.append(forward_ad.unpack_dual(function(dual)))
        for theirs, ours in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs)
    with torch.no_grad():  # and nothing of it has stayed
        torch.testing.assert_close(self_attention(module, x), self_attention(core, x))


@pytest.mark.slow
@pytest.mark.parametrize("seq_len", LENGTHS)
@pytest.mark.parametrize("need_weights", [False, True])
def test_second_derivatives_are_those_of_the_core(
    seq_len: int, need_weights: bool
) -> None:
    core, module = pair()
    for options, mask in masks_of(seq_len):
        x = sequence(seq_len).requires_grad_()
        results = []
        for each in (core, module):
            if each is core:
                output = self_attention(core, x, mask=mask)
            else:
                output = self_attention(each, x, **options, need_weights=need_weights)
                output = output[0] if need_weights else output
            loss = output.pow(3).sum()
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
            inputs = [x, *each.parameters()]
            second = torch.autograd.grad(
                first.square().sum(), inputs, allow_unused=True, materialize_grads=True
            )
            results.append([first, *second])
        for theirs, ours in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_a_second_derivative_under_dropout_drops_the_same_weights() -> None:
    _, module = pair(dropout_prob=0.3)
    x = sequence(151).requires_grad_()

    def first(x: Tensor) -> Tensor:
        torch.manual_seed(11)
        loss = self_attention(module, x, is_causal=True).pow(3).sum()
        return torch.autograd.grad(loss, x, create_graph=True)[0]

    direction = torch.randn_like(x)
    (second,) = torch.autograd.grad(first(x), x, direction)
    ends = [first((x + e * direction).detach().requires_grad_()) for e in (-1e-5, 1e-5)]
    torch.testing.assert_close(second, (ends[1] - ends[0]) / 2e-5, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seq_len", "mode"),
    [(5, "real"), (151, "fake"), (5, "symbolic"), (151, "symbolic")],
)
def test_a_tracer_records_the_function_and_leaves_nothing_behind(
    seq_len: int, mode: str
) -> None:
    core, module = pair()
    x, other = sequence(seq_len), sequence(seq_len)
    state = set(vars(module))
    for options, mask in masks_of(seq_len):

        def call(x: Tensor) -> Any:
            return self_attention(module, x, **options)  # noqa: B023

        with torch.no_grad():
            record = make_fx(call, tracing_mode=mode, _allow_non_fake_inputs=True)
            expected = self_attention(core, other, mask=mask)
            torch.testing.assert_close(record(x)(other), expected)
            torch.testing.assert_close(call(other), expected)
    assert set(vars(module)) == state


# The KV cache ------------------------------------------------------------------------

MODES: list[Any] = [torch.inference_mode, torch.no_grad, torch.enable_grad]


@pytest.mark.parametrize("prompt_mode", MODES)
@pytest.mark.parametrize("token_mode", MODES)
@pytest.mark.parametrize("grow", [False, True])
def test_a_cache_may_be_filled_and_continued_in_any_mode(
    prompt_mode: Any, token_mode: Any, grow: bool
) -> None:
    core, module = pair()
    x = sequence(7)
    with prompt_mode():
        cache = module.cache(BATCH, 1 if grow else 7, grow=grow)
        prompt, _ = module.decode(x[:4], cache)
    with token_mode():
        cache.reorder(torch.tensor([0, 1]))
        token, _ = module.decode(x[4:5], cache)
    with prompt_mode():
        rest, _ = module.decode(x[5:], cache)
    with torch.no_grad():
        expected = self_attention(core, x, mask=past(7))
        torch.testing.assert_close(torch.cat([prompt, token, rest]), expected)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("seq_len", [1, 4])
@pytest.mark.parametrize("where", ["bias", "output"])
def test_after_an_error_the_cache_continues_as_before(
    where: str, seq_len: int, window: int | None
) -> None:
    failing = False

    def fail(*_: Any) -> None:
        if failing:
            raise MemoryError

    def bias(i: Tensor, j: Tensor) -> Tensor:
        fail()
        return (j - i.unsqueeze(1)).unsqueeze(-1).double() / 8

    settings = {"window": window, "scores": fast.Scores(bias=bias)}
    module = fast.MultiHeadAttention(HEADS, D_MODEL, 0.0, **settings).double()
    module.output.register_forward_pre_hook(lambda *_: fail())
    if where == "output":
        module.score_bias = None
    x = sequence(5 + seq_len)
    cache = module.cache(BATCH, 2, grow=True)
    module.decode(x[:5], cache)
    failing = True
    for _ in range(2):
        with pytest.raises(MemoryError):
            module.decode(x[5:], cache)
        assert len(cache) == 5
    failing = False
    # Not the same piece, which would only write once more what the error has left.
    decoded = torch.cat([module.decode(each, cache)[0] for each in x[5:].split(1)])
    expected = self_attention(module, x, is_causal=True)[5:]
    torch.testing.assert_close(decoded, expected)


@pytest.mark.parametrize("sizes", [[5], [4, 1], [1, 1, 3], [2, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("dual", [0, -1], ids=["all", "last"])
def test_decoding_has_the_forward_derivative_of_the_core(
    sizes: list[int], dual: int
) -> None:
    core, module = pair()
    x, direction = sequence(5), sequence(5)
    if dual:  # only the last piece has a tangent
        direction[: -sizes[-1]] = 0
    cache = module.cache(BATCH, 5)
    with forward_ad.dual_level():
        outputs = []
        for piece, tangent in zip(x.split(sizes), direction.split(sizes), strict=True):
            if tangent.any():
                piece = forward_ad.make_dual(piece, tangent)
            outputs.append(module.decode(piece, cache)[0])
        found = forward_ad.unpack_dual(torch.cat(outputs))
        whole = forward_ad.make_dual(x, direction)
        expected = forward_ad.unpack_dual(self_attention(core, whole, mask=past(5)))
        torch.testing.assert_close(found.primal, expected.primal)
        torch.testing.assert_close(found.tangent, expected.tangent)
    assert forward_ad.unpack_dual(cache.buffer).tangent is None


@pytest.mark.parametrize("seq_len", [1, 2])
@pytest.mark.parametrize(
    "transform",
    [
        lambda call, x: torch.func.jvp(call, (x,), (x,)),
        lambda call, x: torch.func.jacfwd(call)(x),
    ],
    ids=["jvp", "jacfwd"],
)
def test_a_tangent_that_the_cache_would_lose_is_refused(
    transform: Any, seq_len: int
) -> None:
    core, module = pair()
    x = sequence(5)
    cache = module.cache(BATCH, 7)
    module.decode(x[:3], cache)

    def decode(x: Tensor) -> Any:
        return module.decode(x, cache)[0]

    piece = x[3 : 3 + seq_len]
    message = (
        r"^`key` has a tangent of `torch.func.jvp`, which a write to the cache loses; "
        r"use `torch.autograd.forward_ad`$"
    )
    with pytest.raises(TypeError, match=message):
        transform(decode, piece)
    rest, _ = module.decode(x[3:], cache)
    torch.testing.assert_close(rest, self_attention(core, x, mask=past(5))[3:])


def decode_fake(module: Any, x: Tensor, cache: Any) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        module.decode(x, cache)


def decode_traced(mode: str) -> Callable[..., None]:
    def decode(module: Any, x: Tensor, cache: Any) -> None:
        def call(x: Tensor) -> Any:
            return module.decode(x, cache)[0]

        make_fx(call, tracing_mode=mode, _allow_non_fake_inputs=True)(x)

    return decode


def decode_exported(module: Any, x: Tensor, cache: Any) -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = module

        def forward(self, x: Tensor) -> Any:
            return self.attention.decode(x, cache)[0]

    torch.export.export(Decoder(), (x,), strict=False)


@pytest.mark.parametrize("seq_len", [1, 2])
@pytest.mark.parametrize(
    "decode",
    [decode_fake, decode_traced("fake"), decode_traced("symbolic"), decode_exported],
)
def test_a_fake_tensor_is_not_appended_to_a_real_cache(
    decode: Callable[..., None], seq_len: int
) -> None:
    core, module = pair()
    x = sequence(7)
    cache = module.cache(BATCH, 2, grow=True)
    module.decode(x[:2], cache)
    message = (
        r"^`key` is a fake tensor, and the cache is not; where a tracer makes fake "
        r"tensors, make the cache in the traced function$"
    )
    with torch.no_grad(), pytest.raises(TypeError, match=message):
        decode(module, x[2 : 2 + seq_len], cache)
    assert len(cache) == cache.capacity == 2
    rest, _ = module.decode(x[2:], cache)
    torch.testing.assert_close(rest, self_attention(core, x, mask=past(7))[2:])


def test_a_real_tensor_is_not_appended_to_a_fake_cache() -> None:
    _, module = pair()
    with FakeTensorMode(allow_non_fake_inputs=True):
        cache = module.cache(BATCH, 7)
        module.decode(sequence(3), cache)
    with pytest.raises(
        TypeError, match=r"^the cache is a fake tensor, and `key` is not; "
    ):
        module.decode(sequence(1), cache)
    assert len(cache) == 3


def test_vmap_does_not_write_to_a_cache() -> None:
    core, module = pair()
    x = sequence(5)
    cache = module.cache(BATCH, 7)
    module.decode(x[:4], cache)
    message = (
        r"^`key` is batched by `vmap`, and the cache is not; decode all sequences as "
        r"one batch$"
    )
    with pytest.raises(TypeError, match=message):
        torch.func.vmap(lambda x: module.decode(x, cache)[0])(
            x[4:].expand(3, 1, -1, -1)
        )
    token, _ = module.decode(x[4:], cache)
    torch.testing.assert_close(token, self_attention(core, x, mask=past(5))[4:])


def test_left_padding_belongs_to_the_cache() -> None:
    _, module = pair()
    x, padding = sequence(5), torch.tensor([0, 3])
    cache = module.cache(BATCH, 5, left_padding=padding)
    module.decode(x[:4], cache)
    padding.zero_()  # the caller counts the padding of the next batch
    token, _ = module.decode(x[4:], cache)
    mask = torch.arange(5).view(1, 5, 1) >= torch.tensor([0, 3])
    expected = self_attention(module, x, is_causal=True, mask=mask)
    torch.testing.assert_close(token, expected[4:])


@pytest.mark.parametrize("left_padding", [None, torch.tensor([0, 1, 2])])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_batch_of_another_size_than_the_cache_is_refused(
    batch_size: int, left_padding: Tensor | None
) -> None:
    _, module = pair()
    cache = module.cache(3, 7, left_padding=left_padding)
    message = rf"`x` has shape \[5, {batch_size}, 21\], not .* batch_size \(=3\),"
    with pytest.raises(ValueError, match=message):
        module.decode(sequence(5)[:, :batch_size], cache)
    assert len(cache) == 0


def test_a_cache_copied_in_inference_mode_continues_outside_of_it() -> None:
    core, module = pair()
    x = sequence(7)
    cache = module.cache(BATCH, 7)
    module.decode(x[:4], cache)
    with torch.inference_mode():
        copied = copy.deepcopy(cache)
    token, _ = module.decode(x[4:], copied)
    torch.testing.assert_close(token, self_attention(core, x, mask=past(7))[4:])


def test_under_autocast_the_cache_of_a_float64_module_is_float64() -> None:
    core, module = pair()
    x = sequence(5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        decoded, _ = module.decode(x, module.cache(BATCH, 5))
    torch.testing.assert_close(decoded, self_attention(core, x, mask=past(5)))


def test_an_empty_cache_is_true() -> None:
    # `if cache:` and `cache or new` ask whether there is one.
    cache = pair()[1].cache(BATCH, 7)
    assert len(cache) == 0
    assert cache


def test_average_weights_alone_is_refused() -> None:
    _, module = pair()
    message = (
        r"^`average_weights` \(=True\) averages what `need_weights` \(=False\) "
        r"returns; pass `need_weights=True` too$"
    )
    with pytest.raises(ValueError, match=message):
        self_attention(module, sequence(5), average_weights=True)


def test_nan_in_padding_computes_nothing_twice() -> None:
    _, module = pair(torch.float32)
    calls: list[str] = []
    for name in ("query", "key", "value", "output"):
        part = getattr(module, name)
        part.register_forward_hook(lambda *_, name=name: calls.append(name))
    x = sequence(151, torch.float32)
    x[-2:, 1] = math.nan
    padding = torch.ones(1, 151, BATCH).bool()
    padding[:, -2:, 1] = False
    self_attention(module, x, mask=padding)
    assert calls == ["query", "key", "value", "output"]
