r"""# Comparing the variants of current decoders

Current language models change multi-head attention so that decoding, or a long
sequence, takes less time. Each *comparison* of this module measures one such change
against a baseline, which is its first implementation:

- `grouped`: a decoding step with as many heads of keys and values as of queries, and
  with an eighth of them;
- `latent`: a decoding step of multi-head latent attention, and the bare products with
  its cache;
- `window`: causal attention and a sliding window, without projections, in a training
  step;
- `window_module`: the same for whole modules;
- `ring`: a decoding step with a ring cache at three positions;
- `linear`: a training step of causal linear attention at four lengths;
- `training`: a training step with grouped heads and rotary positions of Llama, of
  x-transformers and of `fast`.

The implementations of a comparison need not compute the same function. Each is
compared with the formula in plain operators before it is timed. For a training step
the gradient of the input is compared, too.

Source: [Llama 2](https://arxiv.org/abs/2307.09288), Touvron et al. 2023, appendix
A.2.1, for the grouped heads; [DeepSeek-V2](https://arxiv.org/abs/2405.04434),
DeepSeek-AI 2024, section 2.1, for latents; [Mistral
7B](https://arxiv.org/abs/2310.06825), Jiang et al. 2023, section 2, for the window and
the ring; [Transformers are RNNs](https://arxiv.org/abs/2006.16236), Katharopoulos et
al. 2020, for linear attention.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from attention_bench.decoding import TOKENS
from attention_bench.implementations import Outputs, linear
from attention_bench.setting import Setting
from headnotes import convert, fast, masks
from headnotes.fast.attention import attention
from headnotes.variants.latent import LatentAttention
from headnotes.variants.linear import (
    LinearAttention,
    feature_map,
    parallel_linear_attention,
)
from headnotes.variants.rotary import (
    RotaryAttention,
    convert_pairing,
    rotary_frequencies,
)

# The share of heads of queries that have keys and values of their own.
GROUP = 8
WINDOW = 512


@dataclass
class Measured:
    """`call` is timed, after `setup`; its `outputs` must be those `expected`."""

    call: Callable[[], object]
    outputs: Callable[[], Outputs]
    expected: Callable[[], Outputs]
    setup: Callable[[], object] = lambda: None
    # The number of tokens that a call decodes; 0 if it may be repeated in a sample.
    items_per_call: int = 0


class Comparison(NamedTuple):
    """Builds the implementations of a setting by name, the baseline first."""

    setting: Setting
    build: Callable[[Setting], dict[str, Callable[[], Measured]]]


def random(setting: Setting, *sizes: int, seed: int = 7) -> Tensor:
    """Random numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, generator=generator).to(**setting.factory_kwargs)


def prepare(setting: Setting, build: Callable[[], Any]) -> Any:
    """A module with weights for which the rows of attention differ, in evaluation."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        module = build()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return module.to(**setting.factory_kwargs).eval()


def plain_attention(
    query: Tensor,  # [q_len, batch_size, heads, d_k]
    key: Tensor,  # [k_len, batch_size, kv_heads, d_k]
    value: Tensor,  # [k_len, batch_size, kv_heads, d_k]
    window: int | None = None,
) -> Tensor:
    r"""Causal attention by the kernel of PyTorch, with a mask and repeated heads.

    >>> query, key = torch.randn(3, 2, 10, 7), torch.randn(11, 2, 5, 7)
    >>> context = plain_attention(query, key, key, window=1)
    >>> context[2, 0, ::2].equal(key[10, 0]), plain_attention(query, key, key).shape
    (True, torch.Size([3, 2, 10, 7]))
    """
    q_len, k_len = len(query), len(key)
    if window is None:
        mask = masks.causal(q_len, k_len, device=query.device)  # [q_len, k_len, 1]
    else:
        mask = masks.sliding_window(
            q_len, k_len, window=window, device=query.device
        )  # [q_len, k_len, 1]
    group = query.shape[2] // key.shape[2]
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    context = F.scaled_dot_product_attention(
        q, k, v, mask[..., 0]
    )  # [batch_size, heads, q_len, d_k]
    return context.permute(2, 0, 1, 3)  # [q_len, batch_size, heads, d_k]


def step_of_module(
    module: fast.MultiHeadAttention, setting: Setting, position: int
) -> Measured:
    """Decode tokens behind `position` others, of which the cache holds the keys."""
    stored = min(position, module.window or position)
    sizes = setting.batch_size, module.kv_heads, module.d_k
    key = random(setting, stored, *sizes, seed=13)
    value = random(setting, stored, *sizes, seed=17)
    tokens = random(setting, TOKENS, setting.batch_size, setting.d_model)
    cache = module.cache(setting.batch_size, position + TOKENS)
    cache.append(key, value)
    # A ring is full at each multiple of its window: position p is in slot p % window.
    first = cache.buffer[:, :, :, :TOKENS].clone()

    def reset() -> None:
        cache.length = position
        if module.window:
            cache.buffer[:, :, :, :TOKENS] = first

    def call() -> Tensor:
        steps = (tokens[n : n + 1] for n in range(TOKENS))
        return torch.cat([module.decode(token, cache)[0] for token in steps])

    def outputs() -> Outputs:
        reset()
        return {"output": call()}

    def expected() -> Outputs:
        keys = torch.cat([key, module.key(tokens)])
        values = torch.cat([value, module.value(tokens)])
        query = module.query(tokens)
        context = plain_attention(query, keys, values, module.window)
        return {"output": module.output(context.flatten(-2))}

    return Measured(call, outputs, expected, reset, items_per_call=TOKENS)


def build_grouped(setting: Setting) -> dict[str, Callable[[], Measured]]:
    """The fast module with all heads of keys and values, and with an eighth."""

    def build(kv_heads: int) -> Measured:
        module = prepare(
            setting,
            lambda: fast.MultiHeadAttention(
                setting.heads, setting.d_model, 0.0, kv_heads=kv_heads
            ),
        )
        return step_of_module(module, setting, setting.seq_len)

    counts = setting.heads, setting.heads // GROUP
    return {f"{n} kv heads": partial(build, n) for n in counts}


def build_ring(setting: Setting) -> dict[str, Callable[[], Measured]]:
    """The fast module with a window, at positions that are far apart."""

    def build(position: int) -> Measured:
        module = prepare(
            setting,
            lambda: fast.MultiHeadAttention(
                setting.heads, setting.d_model, 0.0, window=WINDOW
            ),
        )
        return step_of_module(module, setting, position)

    positions = [WINDOW * factor for factor in (2, 16, 128)]
    return {f"position {n:,}": partial(build, n) for n in positions}


def build_latent(setting: Setting) -> dict[str, Callable[[], Measured]]:
    """Latent attention, and the two products with its cache around a softmax."""
    rotary_dim, kv_rank = 64, 512

    def build(is_bare: bool) -> Measured:
        module = prepare(
            setting,
            lambda: LatentAttention(
                setting.heads,
                setting.d_model,
                0.0,
                kv_rank=kv_rank,
                rotary_dim=rotary_dim,
            ),
        )
        sizes = setting.seq_len, setting.batch_size, kv_rank + rotary_dim
        past = random(setting, *sizes, seed=13)
        token = random(setting, 1, setting.batch_size, setting.d_model)

        def expected() -> Outputs:
            # Every token is expanded to keys and values of each head.
            position = torch.full((1, 1), setting.seq_len, device=token.device)
            content, rotated = module.get_queries(token, position)
            latent = module.latent_norm(module.latent(token))
            shared = module.get_rotary_key(token, position)
            latents = torch.cat([past[..., :kv_rank], latent])
            keys = torch.cat([past[..., kv_rank:], shared])
            scores = torch.einsum("ibhd,jbhd->ijbh", content, module.key(latents))
            scores = scores + torch.einsum("ibhd,jbd->ijbh", rotated, keys)
            values = module.value(latents)
            context = torch.einsum("ijbh,jbhd->ibhd", scores.softmax(1), values)
            return {"output": module.output(context.flatten(-2))}

        if not is_bare:
            cache = module.cache(setting.batch_size, setting.seq_len + 1)
            cache.append(past)

            def step() -> Tensor:
                cache.length = setting.seq_len
                output: Tensor = module.decode(token, cache)[0]
                return output

            return Measured(step, lambda: {"output": step()}, expected)
        bare = BareLatent(module, token, past)
        return Measured(bare.products, bare.outputs, expected)

    return {
        "bare products": partial(build, is_bare=True),
        "latent": partial(build, is_bare=False),
    }


class BareLatent:
    """The products of one step with the cache; all else is computed beforehand."""

    def __init__(self, module: LatentAttention, token: Tensor, past: Tensor) -> None:
        self.module = module
        position = torch.full((1, 1), len(past), device=token.device)
        content, rotated = module.get_queries(token, position)
        latent = module.latent_norm(module.latent(token))
        shared = module.get_rotary_key(token, position)
        new = torch.cat([latent, shared], dim=-1)
        self.cache = torch.cat([past, new]).transpose(0, 1)
        up = module.key.linear.weight.view(module.heads, module.d_k, -1)
        absorbed = torch.einsum("ibhd,hdr->ibhr", content, up)
        self.query = torch.cat([absorbed, rotated], dim=-1)[0]

    def products(self) -> Tensor:
        """The mean of the latents for each head, `[batch_size, heads, kv_rank]`."""
        weights = (self.query @ self.cache.mT).softmax(dim=-1)
        mean: Tensor = weights @ self.cache[..., : self.module.kv_rank]
        return mean

    def outputs(self) -> Outputs:
        """The output of the step, from the mean of the latents."""
        value = self.module.value
        up = value.linear.weight.view(self.module.heads, value.d_k, -1)
        context = torch.einsum("bhr,hdr->bhd", self.products(), up)
        return {"output": self.module.output(context.flatten(-2)).unsqueeze(0)}


def training_step(
    function: Callable[[Tensor], Tensor],
    expected: Callable[[Tensor], Tensor],
    x: Tensor,
    parameters: tuple[nn.Parameter, ...] = (),
) -> Measured:
    """A forward and a backward pass; the gradient of the input is compared, too."""
    x = x.detach().clone().requires_grad_()
    with torch.no_grad():
        grad_output = torch.randn_like(function(x))

    def call() -> None:
        output: Any = function(x)
        output.backward(grad_output)
        # As `optimizer.zero_grad()` does: the next step allocates new gradients.
        for leaf in (x, *parameters):
            leaf.grad = None

    def outputs_of(one: Callable[[Tensor], Tensor]) -> Outputs:
        with torch.enable_grad():
            output = one(x)
            (gradient,) = torch.autograd.grad(output, x, grad_output)
        return {"output": output.detach(), "input gradient": gradient}

    return Measured(call, lambda: outputs_of(function), lambda: outputs_of(expected))


def build_window(setting: Setting) -> dict[str, Callable[[], Measured]]:
    """Causal attention without and with a window, of given queries, keys and values."""
    d_k = setting.d_model // setting.heads
    sizes = setting.seq_len, setting.batch_size, setting.heads, 3 * d_k

    def build(window: int | None) -> Measured:
        def ours(x: Tensor) -> Tensor:
            q, k, v = x.chunk(3, -1)
            return attention(q, k, v, is_causal=True, window=window)[0]

        def theirs(x: Tensor) -> Tensor:
            q, k, v = x.chunk(3, -1)
            return plain_attention(q, k, v, window)

        return training_step(ours, theirs, random(setting, *sizes))

    return {
        "causal": partial(build, None),
        f"window {WINDOW}": partial(build, WINDOW),
    }


def build_window_module(setting: Setting) -> dict[str, Callable[[], Measured]]:
    """The fast module, causal, without and with a window."""

    def build(window: int | None) -> Measured:
        module = prepare(
            setting,
            lambda: fast.MultiHeadAttention(
                setting.heads, setting.d_model, 0.0, window=window
            ),
        )

        def ours(x: Tensor) -> Tensor:
            output: Tensor = module(query=x, key=x, value=x, is_causal=True)
            return output

        def theirs(x: Tensor) -> Tensor:
            parts = module.query(x), module.key(x), module.value(x)
            output: Tensor = module.output(plain_attention(*parts, window).flatten(-2))
            return output

        module.train()
        return training_step(ours, theirs, setting.x(), tuple(module.parameters()))

    return {
        "causal": partial(build, None),
        f"window {WINDOW}": partial(build, WINDOW),
    }


def build_linear(setting: Setting) -> dict[str, Callable[[], Measured]]:
    """Causal linear attention in chunks; its parallel form is the reference."""

    def build(length: int) -> Measured:
        module = prepare(
            setting, lambda: LinearAttention(setting.heads, setting.d_model)
        )

        def ours(x: Tensor) -> Tensor:
            output: Tensor = module(query=x, key=x, value=x, is_causal=True)
            return output

        def theirs(x: Tensor) -> Tensor:
            mask = masks.causal(length, length, device=x.device)
            query, key = feature_map(module.query(x)), feature_map(module.key(x))
            context = parallel_linear_attention(query, key, module.value(x), mask)
            output: Tensor = module.output(context.flatten(-2))
            return output

        module.train()
        x = random(setting, length, setting.batch_size, setting.d_model)
        return training_step(ours, theirs, x, tuple(module.parameters()))

    lengths = [setting.seq_len * factor for factor in (1, 2, 4, 8)]
    return {f"length {length:,}": partial(build, length) for length in lengths}


def build_training(setting: Setting) -> dict[str, Callable[[], Measured]]:
    """Causal attention with grouped heads and rotary positions, of three packages."""
    d_k, kv_heads = setting.d_model // setting.heads, setting.heads // 4
    # The reference has a head of keys and values for each head of queries.
    core = prepare(setting, lambda: RotaryAttention(setting.heads, setting.d_model))
    for layer in (core.key.linear, core.value.linear):
        for parameter in (layer.weight, layer.bias):
            rows = parameter.data.view(kv_heads, 4, d_k, -1)
            rows.copy_(rows[:, :1].clone().expand_as(rows))
    mask = masks.causal(setting.seq_len, device=setting.device)

    def expected(x: Tensor) -> Tensor:
        output: Tensor = core(query=x, key=x, value=x, mask=mask)
        return output

    def measured(build: Callable[..., Any]) -> Measured:
        module, function = build(core, kv_heads, setting)
        parameters = tuple(module.parameters())
        return training_step(function, expected, setting.x(), parameters)

    builders = {
        "llama": grouped_llama,
        "x-transformers": grouped_x_transformers,
        "fast": grouped_fast,
    }
    return {name: partial(measured, build) for name, build in builders.items()}


def grouped(projection: nn.Linear, kv_heads: int) -> convert.Projection:
    r"""The projection of a group's one head, of which `projection` has copies.

    >>> grouped(nn.Linear(5, 24), kv_heads=2).weight.shape
    torch.Size([6, 5])
    """
    d_in = projection.in_features
    weight = projection.weight.view(kv_heads, 4, -1, d_in)[:, 0].reshape(-1, d_in)
    bias = projection.bias.view(kv_heads, 4, -1)[:, 0].flatten()
    return convert.Projection(weight, bias)


def grouped_fast(core: Any, kv_heads: int, setting: Setting) -> Any:
    """The fast module."""
    frequencies = rotary_frequencies(setting.d_model // setting.heads)
    module = fast.MultiHeadAttention(
        setting.heads,
        setting.d_model,
        0.0,
        kv_heads=kv_heads,
        rotary=fast.Rotary(frequencies),
    ).to(**setting.factory_kwargs)
    module.query.linear = linear(convert.Projection(*core.query.linear.parameters()))
    module.key.linear = linear(grouped(core.key.linear, kv_heads))
    module.value.linear = linear(grouped(core.value.linear, kv_heads))
    module.output.load_state_dict(core.output.state_dict())
    return module, lambda x: module(query=x, key=x, value=x, is_causal=True)


def grouped_llama(core: Any, kv_heads: int, setting: Setting) -> Any:
    """The attention of Llama, with the kernel of PyTorch."""
    from transformers.models.llama import configuration_llama, modeling_llama

    config = configuration_llama.LlamaConfig(
        hidden_size=setting.d_model,
        num_attention_heads=setting.heads,
        num_key_value_heads=kv_heads,
        attn_implementation="sdpa",
    )
    module = modeling_llama.LlamaAttention(config, layer_idx=0)
    set_projections(module, "{}_proj", core, kv_heads)
    positions = torch.arange(setting.seq_len, device=setting.device).unsqueeze(0)
    rotary = modeling_llama.LlamaRotaryEmbedding(config).to(setting.device)
    angles = rotary(setting.x(), positions)
    kwargs = {"attention_mask": None, "position_embeddings": angles}

    def function(x: Tensor) -> Tensor:
        output: Tensor = module(x.transpose(0, 1), **kwargs)[0]
        return output.transpose(0, 1)

    return module, function


def grouped_x_transformers(core: Any, kv_heads: int, setting: Setting) -> Any:
    """The attention of x-transformers.

    Neighboring components form a pair. The heads of queries that share a head of keys
    do not follow one another: they are `kv_heads` apart.
    """
    from x_transformers.x_transformers import Attention, RotaryEmbedding

    d_k = setting.d_model // setting.heads
    module = Attention(
        setting.d_model,
        dim_head=d_k,
        heads=setting.heads,
        kv_heads=kv_heads,
        causal=True,
        flash=True,
    )
    set_projections(module, "to_{}", core, kv_heads)
    for layer, heads in ((module.to_q, setting.heads), (module.to_k, kv_heads)):
        for parameter in (layer.weight, layer.bias):
            parameter.data = convert_pairing(parameter.data, heads, to="neighbors")

    def apart(x: Tensor) -> Tensor:
        rows = x.reshape(kv_heads, -1, d_k, *x.shape[1:]).transpose(0, 1)
        return rows.reshape(x.shape)

    for parameter in (module.to_q.weight, module.to_q.bias):
        parameter.data = apart(parameter.data)
    module.to_out.weight.data = apart(module.to_out.weight.data.T).T.contiguous()
    rotary = RotaryEmbedding(d_k).to(setting.device)
    angles = rotary.forward_from_seq_len(setting.seq_len)

    def function(x: Tensor) -> Tensor:
        output: Tensor = module(x.transpose(0, 1), rotary_pos_emb=angles)
        return output.transpose(0, 1)

    return module, function


def set_projections(module: Any, name: str, core: Any, kv_heads: int) -> None:
    """Replace the projections of a module, named `q`, `k`, `v`, and `o` or `out`."""
    output = "o" if hasattr(module, name.format("o")) else "out"
    query, own = core.query.linear, core.output
    projections = {
        "q": convert.Projection(query.weight, query.bias),
        "k": grouped(core.key.linear, kv_heads),
        "v": grouped(core.value.linear, kv_heads),
        output: convert.Projection(own.weight, own.bias),
    }
    for letter, projection in projections.items():
        setattr(module, name.format(letter), linear(projection))


WIDE = Setting(8, 4096, decoding=True, d_model=2048, heads=32)
COMPARISONS = {
    "grouped": Comparison(WIDE, build_grouped),
    "latent": Comparison(WIDE, build_latent),
    "window": Comparison(Setting(1, 8192, "causal", training=True), build_window),
    "window_module": Comparison(
        Setting(1, 8192, "causal", training=True), build_window_module
    ),
    "ring": Comparison(Setting(1, WINDOW, decoding=True), build_ring),
    "linear": Comparison(Setting(1, 512, "causal", training=True), build_linear),
    "training": Comparison(Setting(4, 512, "causal", training=True), build_training),
}
