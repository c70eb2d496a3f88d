r"""# Functions that counterexamples call

A counterexample is a short program. Beside the attention it calls only the functions of
this module: seeded random inputs, randomized weights, a dropout probability, and a
reference implementation to compare with; and [recorders](recorders.md) of what a call
computes.

Weights at their usual initialization make attention nearly uniform, and many biases are
initialized to zero. A wrong mask or a wrong scale then changes the output by less than
rounding. So all trainable parameters are randomized at a larger scale before each test.
Training could reach any of these values, so a correct implementation satisfies the laws
with all of them.

Source: [Attention Is All You Need](https://arxiv.org/abs/1706.03762), Vaswani et al.
2017, section 3.2, for the formula.
"""

import copy
import re
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn


def seeded_randn(seed: int, *shape: int) -> Tensor:
    r"""Normally distributed random numbers, the same on every device.

    They are generated on the CPU, independently of the global random state.

    >>> seeded_randn(1, 2).equal(seeded_randn(1, 2))
    True
    >>> seeded_randn(1, 2).equal(seeded_randn(2, 2))
    False
    """
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Numbers for weights of fewer entries are kept: a check builds thousands of modules.
SMALL_WEIGHT = 4096
kept_randn = lru_cache(maxsize=256)(seeded_randn)


def randomize_parameters(module: nn.Module) -> None:
    r"""Randomize weights so that rows of attention differ, and biases away from zero.

    Buffers and parameters with `requires_grad=False` stay as they are.

    >>> linear = nn.Linear(100, 100)
    >>> randomize_parameters(linear)
    >>> round(linear.weight.std().item(), 2)  # 1.5 / 10
    0.15
    """
    convolutions = {
        id(part.weight)
        for part in module.modules()
        if isinstance(part, nn.modules.conv._ConvNd)
    }
    with torch.no_grad():
        for n, weight in enumerate(p for p in module.parameters() if p.requires_grad):
            make_noise = kept_randn if weight.numel() < SMALL_WEIGHT else seeded_randn
            noise = make_noise(1000 + n, *weight.shape).to(weight)
            if weight.dim() > 1 and not (weight == 1).all():
                is_convolution = id(weight) in convolutions
                fan_in = weight[0].numel() if is_convolution else weight.shape[-1]
                weight.copy_(noise).mul_(1.5 / fan_in**0.5)
            else:
                # Added, not copied: the weight of a normalization layer stays near 1.
                # What `torch.empty` left uninitialized, for a model to fill, is 0.
                weight.masked_fill_(~(weight.abs() < 1e4), 0.0).add_(noise, alpha=0.3)


def scale_parameters(module: nn.Module, factor: float) -> None:
    r"""Multiply all parameters of a module, which makes its scores large.

    >>> norm = nn.LayerNorm(2)
    >>> scale_parameters(norm, 3.0)
    >>> norm(torch.tensor([4.0, 8.0])).round()
    tensor([-3.,  3.], grad_fn=<RoundBackward0>)
    """
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(factor)


def zero_biases(module: nn.Module) -> None:
    """Set the biases of linear layers and of norms to zero, in place.

    Random ones may be so large that the largest logit is that of one id everywhere.

    >>> layer = nn.Linear(2, 3)
    >>> zero_biases(layer)
    >>> layer.bias.tolist()
    [0.0, 0.0, 0.0]
    """
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.LayerNorm) and part.bias is not None:
            part.bias.data.zero_()


def convert_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    r"""Convert the floating-point buffers of a module, but not its parameters.

    >>> module = nn.BatchNorm1d(3)
    >>> convert_buffers(module, torch.float16)
    >>> module.running_mean.dtype, module.weight.dtype
    (torch.float16, torch.float32)
    """
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def detached_copy(module: nn.Module) -> nn.Module:
    r"""A deep copy, even of a module that stores tensors with their graph.

    >>> module = nn.Linear(2, 2)
    >>> module.cache = {"y": module(torch.ones(2))}
    >>> detached_copy(module).cache["y"].grad_fn is None
    True
    """
    stored = [t for part in module.modules() for t in tensors_in(vars(part))]
    detached = {id(t): t.detach().clone() for t in stored if not t.is_leaf}
    copied: nn.Module = copy.deepcopy(module, detached)
    return copied


def unregistered_tensors(module: nn.Module) -> list[str]:
    r"""Attributes that require a gradient, and are parameters of no module.

    >>> module = nn.Linear(2, 3)
    >>> module.scale = torch.ones(1, requires_grad=True)
    >>> unregistered_tensors(module), unregistered_tensors(nn.Linear(2, 3))
    (['scale'], [])
    """
    known = {id(parameter) for parameter in module.parameters()}
    return [
        f"{path}.{name}".strip(".")
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, Tensor) and value.requires_grad and value.is_leaf
        if id(value) not in known
    ]


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a value, also those in its dicts, lists, tuples and fields."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value) and not isinstance(value, dict):
        value = vars(value)
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in tensors_in(each)]
    return []


def rotary_table(start: int, stop: int, width: int) -> Tensor:
    r"""The angles of a rotary encoding, `[positions, width]`, for pairs of halves.

    >>> rotary_table(1, 3, 2)
    tensor([[1., 1.],
            [2., 2.]])
    """
    speed = 10000 ** -(torch.arange(0, width, 2) / width)
    return (torch.arange(start, stop)[:, None] * speed).repeat(1, 2)


def rotary_complex(start: int, stop: int, width: int) -> Tensor:
    r"""The rotations of a rotary encoding, as complex numbers for pairs of neighbors.

    >>> rotary_complex(0, 1, 4)
    tensor([[1.+0.j, 1.+0.j]])
    """
    angle = rotary_table(start, stop, width)[:, : width // 2]
    return torch.polar(torch.ones_like(angle), angle)


def rotary_matrices(start: int, stop: int, width: int) -> Tensor:
    r"""The rotations of a rotary encoding, as matrices for pairs of neighbors.

    >>> rotary_matrices(0, 1, 2)
    tensor([[[[1., -0.],
              [0., 1.]]]])
    """
    angle = rotary_table(start, stop, width)[:, : width // 2]
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([cos, -sin, sin, cos], dim=-1).reshape(*angle.shape, 2, 2)


def flip_items(cache: Any, batch_size: int) -> Any:
    r"""The tensors of a cache, with their batch items in reverse order.

    >>> flip_items({"key": torch.tensor([1, 2]), "length": 1}, 2)
    {'key': tensor([2, 1]), 'length': 1}
    """
    if isinstance(cache, Tensor):
        return cache.flip(list(cache.shape).index(batch_size))
    if isinstance(cache, dict):
        return {name: flip_items(each, batch_size) for name, each in cache.items()}
    if isinstance(cache, tuple | list):
        items = [flip_items(each, batch_size) for each in cache]
        return type(cache)(*items) if hasattr(cache, "_fields") else tuple(items)
    return cache


def can_flip_items(cache: Any, batch_size: int) -> bool:
    r"""Whether each tensor of a cache has one axis of the batch size.

    >>> can_flip_items((torch.zeros(2, 3),), 2), can_flip_items(torch.zeros(2, 2), 2)
    (True, False)
    >>> can_flip_items([object()], 2)
    False
    """
    tensors = [*tensors_in(cache)]
    is_known = isinstance(cache, Tensor | dict | list | tuple) and bool(tensors)
    return is_known and all([*t.shape].count(batch_size) == 1 for t in tensors)


def count_outcomes(samples: Tensor) -> int:
    r"""How many different vectors there are among the rows of `samples`.

    >>> count_outcomes(torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]]))
    2
    """
    samples = samples.detach().flatten(1).double()
    line = samples @ seeded_randn(3, samples.shape[1]).to(samples)
    steps = line.sort().values.diff()
    return 1 + int((steps > 1e-5 * samples.abs().max()).sum())


def captured_inputs(call: Callable[[], Any], layer: nn.Module) -> list[Tensor]:
    r"""The first input of a layer, each time that it is called.

    >>> layer = nn.Linear(2, 2)
    >>> captured_inputs(lambda: layer(layer(torch.ones(2))), layer)[0]
    tensor([1., 1.])
    """
    seen: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    call()
    handle.remove()
    return seen


def captured_input(call: Callable[[], Any], layer: nn.Module) -> Tensor:
    """The first input of a layer, the first time that it is called."""
    return captured_inputs(call, layer)[0]


def kept_outputs(layer: nn.Module) -> list[Tensor]:
    """A list to which the outputs of a layer are appended from now on."""
    outputs: list[Tensor] = []
    layer.register_forward_hook(lambda _, inputs, output: outputs.append(output))
    return outputs


def are_in_proportion(gradient: Tensor, weights: Tensor) -> bool:
    r"""Whether the gradient `[k_len, width]` of values is that of `[heads, k_len]`.

    Each feature belongs to one of the heads. Where features have more than that many
    proportions, they are not those of weights alone, and nothing is known.

    >>> weights = torch.tensor([[0.25, 0.75]])
    >>> are_in_proportion(torch.tensor([[1.0, 2], [3, 6]]), weights)
    True
    >>> are_in_proportion(torch.tensor([[1.0, 2], [1, 2]]), weights)
    False
    """
    total = gradient.sum(dim=0)
    seen = total.abs() > 0.05 * total.abs().max()
    of_features = (gradient[:, seen] / total[seen]).T
    of_heads = (weights / weights.sum(dim=-1, keepdim=True)).nan_to_num()
    distances = torch.cdist(of_features, of_features, p=torch.inf)
    count = len({*map(tuple, (distances < 1e-3).tolist())})
    closest = torch.cdist(of_features, of_heads.to(of_features), p=torch.inf)
    return count > len(weights) or bool(closest.amin(dim=1).max() < 1e-2)


def count_changed(
    call: Callable[[], Any], weight: Tensor, row: int, layer: nn.Module
) -> int:
    r"""How many features of the input of a layer depend on a row of a weight.

    >>> first, last = nn.Linear(2, 4), nn.Linear(4, 1)
    >>> count_changed(lambda: last(first(torch.ones(3, 2))), first.weight, 0, last)
    1
    """
    before = captured_input(call, layer)
    weight.data[row] *= -1
    change = (captured_input(call, layer) - before).detach().abs()
    weight.data[row] *= -1
    of_feature = change.flatten(0, -2).amax(dim=0)
    return int((of_feature > 1e-3 * of_feature.max()).sum())


def reverse_token(layer: nn.Module, token: int, length: int) -> None:
    r"""Reverse the sign of what a layer computes for a token of one sequence.

    What it computes for anything but `length` tokens remains.

    >>> layer = nn.Identity()
    >>> reverse_token(layer, 1, length=2)
    >>> layer(torch.ones(1, 2, 3))[0, :, 0], layer(torch.ones(1, 3, 3)).min()
    (tensor([ 1., -1.]), tensor(1.))
    """

    def reverse(_: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        rows = output.reshape(-1, output.shape[-1]).clone()
        if len(rows) == length:
            rows[token] *= -1
        return rows.reshape(output.shape)

    layer.register_forward_hook(reverse)


def is_called(call: Callable[[], Any], layer: nn.Module) -> bool:
    r"""Whether a layer is called during a call.

    >>> layer = nn.Linear(2, 2)
    >>> is_called(lambda: layer(torch.ones(2)), layer), is_called(lambda: None, layer)
    (True, False)
    """
    seen: list[bool] = []
    handle = layer.register_forward_pre_hook(lambda *_: seen.append(True))
    call()
    handle.remove()
    return bool(seen)


def is_between(call: Callable[[], Any], module: nn.Module, layer: nn.Module) -> bool:
    r"""Whether a layer gets what projections return, and returns none of their inputs.

    So it is between the projections and the product of queries and keys.

    >>> first, norm, last = nn.Linear(2, 4), nn.LayerNorm(4), nn.Linear(4, 1)
    >>> module, x = nn.Sequential(first, norm, last), torch.ones(3, 2)
    >>> is_between(lambda: module(x), module, norm)
    False
    >>> is_between(lambda: norm(first(x)), module, norm)
    True
    """
    kinds = (nn.Linear, nn.modules.conv._ConvNd)
    projections = [part for part in module.modules() if isinstance(part, kinds)]
    given: list[Tensor] = []
    returned: list[Tensor] = []
    through: list[tuple[Tensor, Tensor]] = []

    def note(_: nn.Module, inputs: Any, output: Any) -> None:
        given.append(inputs[0].flatten())
        returned.append(output.flatten())

    def pass_through(_: nn.Module, inputs: Any, output: Any) -> None:
        through.append((inputs[0], output))

    handles = [part.register_forward_hook(note) for part in projections]
    handles.append(layer.register_forward_hook(pass_through))
    call()
    for handle in handles:
        handle.remove()
    if not (through and returned):
        return False
    known = torch.cat(returned)
    return all(
        bool(torch.isin(x, known).all() and not torch.isin(y, torch.cat(given)).all())
        for x, y in through
    )


def have_same_shapes(one: nn.Module, other: nn.Module) -> bool:
    r"""Whether two modules have parameters of the same names and shapes.

    >>> have_same_shapes(nn.Linear(2, 3), nn.Linear(2, 4))
    False
    """
    shapes = [{n: p.shape for n, p in m.named_parameters()} for m in (one, other)]
    return shapes[0] == shapes[1]


def is_random(call: Callable[[], Any], tries: int = 8) -> bool:
    r"""Whether the output of a call depends on the seed.

    >>> is_random(lambda: torch.rand(2)), is_random(lambda: torch.ones(2))
    (True, False)
    """
    outputs = []
    for seed in range(tries):
        torch.manual_seed(seed)
        outputs.append([*tensors_in(call())])
        if not all(map(torch.equal, outputs[0], outputs[-1])):
            return True
    return False


def draws_without_effect(call: Callable[[], Any], tries: int = 8) -> bool:
    r"""Whether a call draws random numbers, and gives the same output for all seeds.

    >>> draws_without_effect(lambda: 0 * torch.rand(2))
    True
    >>> draws_without_effect(lambda: torch.rand(2)), draws_without_effect(lambda: 0)
    (False, False)
    """
    draws = []

    def note_draw() -> Any:
        before = random_states()
        result = call()
        draws.append(not all(map(torch.equal, before, random_states())))
        return result

    return not is_random(note_draw, tries) and all(draws)


def random_states() -> list[torch.Tensor]:
    """The states of all generators of PyTorch: of the CPU and of each GPU."""
    of_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *of_gpus]


def silence_convolutions(module: nn.Module) -> None:
    r"""Set the kernels of convolutions to zero, but for those of single tokens.

    >>> layers = nn.ModuleList([nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 1)])
    >>> silence_convolutions(layers)
    >>> [bool(layer.weight.any()) for layer in layers]
    [False, True]
    """
    for part in module.modules():
        if isinstance(part, nn.modules.conv._ConvNd) and max(part.kernel_size) > 1:
            nn.init.zeros_(part.weight)


# Nodes of the graph of gradients: activations, and what only changes a shape.
ACTIVATIONS = re.compile(r"Tanh|Sigmoid|Relu|LeakyRelu|Gelu|Silu|Elu|Softplus")
RESHAPES = re.compile(
    r"(Unsafe)?View|_?Reshape(Alias|Copy)?|Transpose|Permute|T|Clone|Unbind|Slice|Select"
    r"|Squeeze|Unsqueeze"
)


def are_on_a_line(tensors: list[Tensor]) -> bool:
    r"""Whether tensors change in equal steps.

    >>> x = torch.tensor([2.0, 3.0])
    >>> are_on_a_line([x, 2 * x, 3 * x]), are_on_a_line([x, x**2, x**3])
    (True, False)
    """
    one, two, three = tensors
    bend = (three - two - (two - one)).abs().max()
    return bool(bend <= 1e-3 * (three - one).abs().max())


def last_activation(output: Tensor) -> str:
    r"""The activation behind which nothing but the shape changes; "" if there is none.

    >>> x = torch.ones(2, 3, requires_grad=True)
    >>> last_activation((2 * x).tanh().mT), last_activation(2 * x.tanh())
    ('tanh', '')
    """
    node = output.grad_fn
    while node is not None:
        kind = re.sub(r"Backward\d*$", "", node.name())
        if ACTIVATIONS.fullmatch(kind):
            return kind.lower()
        if not RESHAPES.fullmatch(kind):
            return ""
        node = node.next_functions[0][0]
    return ""


def value_features(call: Callable[[], Any], layer: nn.Module, index: str) -> Tensor:
    r"""Which features of a layer have influence on the output of a single token.

    Its only key has a weight of one, whatever the scores are, so these are values.

    >>> layer = nn.Linear(2, 4)
    >>> value_features(lambda: layer(torch.ones(2))[2:], layer, "")
    tensor([False, False,  True,  True])
    """
    seen: list[Tensor] = []
    handle = layer.register_forward_hook(lambda _, x, y: seen.append(y))
    output = eval(f"result{index}", {"result": call()})
    handle.remove()
    (grad,) = torch.autograd.grad(loss(output), seen[0])
    size = rows_of_layer(grad, layer).abs().amax(dim=0)
    return size > 1e-4 * size.max()


def rows_of_layer(x: Tensor, layer: nn.Module) -> Tensor:
    r"""The input or the output of a layer, or a gradient, as `[tokens, features]`.

    >>> rows_of_layer(torch.ones(2, 4, 3, 5), nn.Conv2d(4, 4, 1)).shape
    torch.Size([30, 4])
    """
    if isinstance(layer, nn.modules.conv._ConvNd):
        x = x.movedim(-len(layer.kernel_size) - 1, -1)
    return x.reshape(-1, x.shape[-1])


def keep_gradients(layer: nn.Module, features: list[int]) -> None:
    r"""Stop the gradients of all features of a layer but those that are given.

    >>> layer, x = nn.Linear(1, 2, bias=False), torch.ones(1, requires_grad=True)
    >>> keep_gradients(layer, [1])
    >>> torch.equal(torch.autograd.grad(layer(x).sum(), x)[0], layer.weight[1])
    True
    """

    def stop(_: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        has_gradient = torch.zeros(
            output.shape[-1], dtype=torch.bool, device=output.device
        )
        has_gradient[features] = True
        return output.where(has_gradient, output.detach())

    layer.register_forward_hook(stop)


def loss(output: Tensor) -> Tensor:
    r"""A scalar to differentiate: the sum of the output times fixed random weights.

    A plain sum would not do. The outputs of a layer normalization, for example, always
    have the same sum, whose gradient is zero.

    >>> loss(torch.zeros(2, 3))
    tensor(0.)
    """
    return (output * seeded_randn(7, *output.shape).to(output)).sum()


def wrong_gradients(
    call: Callable[[], Any], module: nn.Module, index: str
) -> list[str]:
    """The parameters whose gradient is not the slope of the loss, in random directions.

    Only if a backward pass is written by hand: PyTorch's own pass on what they need.
    """

    def loss_of_call() -> Tensor:
        return loss(eval(f"result{index}", {"result": call()}))

    found = loss_of_call()
    weights = {n: w for n, w in module.named_parameters() if w.requires_grad}
    if not (weights and has_own_backward(found)):
        return []
    grads = torch.autograd.grad(found, [*weights.values()], materialize_grads=True)
    wrong = []
    for seed, (name, weight, grad) in enumerate(
        zip(weights, weights.values(), grads, strict=True)
    ):
        u = seeded_randn(seed, *weight.shape).to(weight)
        u /= u.norm()
        losses = []
        for step in (0.01, -0.02):
            weight.data += step * u
            losses.append(loss_of_call().detach())
        weight.data += 0.01 * u
        slope = (losses[0] - losses[1]) / 0.02
        tolerance = 0.05 * grad.square().mean().sqrt() + 0.001
        if ((grad * u).sum() - slope).abs() > tolerance:
            wrong.append(name)
    return wrong


def has_own_backward(output: Tensor) -> bool:
    r"""Whether a function in the graph of an output has a backward pass of its own.

    >>> has_own_backward(torch.ones(2, requires_grad=True).sum())
    False
    """
    functions, seen = [output.grad_fn], set()
    while functions:
        function = functions.pop()
        if isinstance(function, torch.autograd.function.BackwardCFunction):
            return True
        if function is not None and function not in seen:
            seen.add(function)
            functions += [each for each, _ in function.next_functions]
    return False


def split_heads(x: Tensor, layout: str, heads: int) -> Tensor:
    r"""Convert from any layout to `[batch_size, heads, length, d_k]`.

    >>> split_heads(torch.zeros(7, 2, 15), "lbd", heads=3).shape
    torch.Size([2, 3, 7, 5])
    >>> split_heads(torch.zeros(7, 15), "ld", heads=3).shape
    torch.Size([1, 3, 7, 5])
    """
    if "h" not in layout:
        # A projection that is fused by heads arrives as `[..., heads, d_k]`.
        x = x.flatten(len(layout) - 1)
        x = x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)
        layout = layout.replace("d", "hd")
    if "b" not in layout:
        x, layout = x[None], "b" + layout
    return x.permute([layout.index(axis) for axis in "bhld"])


def merge_heads(x: Tensor, layout: str) -> Tensor:
    r"""Convert from `[batch_size, heads, length, d_k]` back to a layout.

    >>> merge_heads(torch.zeros(2, 3, 7, 5), "lbd").shape
    torch.Size([7, 2, 15])
    """
    if "h" in layout:
        return x.permute(["bhld".index(axis) for axis in layout])
    x = x.transpose(1, 2).flatten(2)
    return x.permute(["bld".index(axis) for axis in layout]) if "b" in layout else x[0]


def after_reset(module: nn.Module, method: str) -> nn.Module:
    r"""The same module, after a call of its method that removes what it stored.

    >>> module = nn.Linear(2, 3)
    >>> after_reset(module, "reset_parameters") is module
    True
    """
    getattr(module, method)()
    return module


def distance_encoding(length: int, width: int) -> Tensor:
    r"""Sines and cosines of the distances from `length - 1` down to `1 - length`.

    Transformer-XL and speech models get them as `[1, 2 * length - 1, width]`.

    Source: [Dai et al. 2019](https://arxiv.org/abs/1901.02860), appendix B.

    >>> distance_encoding(3, 2)[0, :, 0].sign()
    tensor([ 1.,  1.,  0., -1., -1.])
    """
    distances = torch.arange(length - 1, -length, -1.0)
    frequencies = 10000 ** (-torch.arange((width + 1) // 2) / ((width + 1) // 2))
    angles = distances[:, None] * frequencies
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[None, :, :width]


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    softcap: float | None = None,
) -> Tensor:
    r"""The formula of attention, on tensors `[batch_size, heads, length, d_k]`.

    `mask` is bool, `[batch_size or 1, 1, q_len, k_len]`, True = may attend. With
    grouped queries, $g$ query heads share one head of keys and values: query head $h$
    attends to head `h // g`. Scores are limited to `softcap`, if given, by a hyperbolic
    tangent.

    >>> value = torch.tensor([[[[2.0], [4.0]]]])
    >>> mask = torch.tensor([[[[True, True], [True, False]]]])
    >>> reference_attention(torch.zeros(1, 1, 2, 1), value, value, mask).flatten()
    tensor([3., 2.])
    """
    group_size = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group_size, dim=1) for x in (key, value))
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    weights: Tensor = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
    return weights @ value
