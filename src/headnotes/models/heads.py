r"""# Looking into the heads of a trained model

These functions show what the attention heads of a [translator](translator.md) do, and
test it: `attention_maps` returns the weights of every head, `statistics` summarizes
them, and `without_head` and `with_uniform_head` return the model with one head changed,
so that the change of its loss can be measured.

An attention map shows which positions a head mixes. It does not show whether the model
uses the result: the output projection may ignore it, or another head may do the same.
Only an intervention tells. *Zero ablation* removes what a head adds to the output.
*Uniform weights* leave the head its mean over the allowed keys, and take only its
choice among them.

Every attention has a name: `encoder.0`, `decoder.1.self`, `decoder.1.cross`.

Source: [Are Sixteen Heads Really Better than One?](https://arxiv.org/abs/1905.10650),
Michel et al. 2019, for ablating heads; [Attention is not
Explanation](https://arxiv.org/abs/1902.10186), Jain and Wallace 2019, for what a map
does not prove.
"""

import copy
from typing import Any

import torch
from torch import Tensor

from headnotes import mha
from headnotes.models.translator import Translator


def attentions(model: Translator) -> dict[str, Any]:
    r"""The attention modules of a model, by name.

    >>> list(attentions(Translator(vocab_size=11, layers=1)))
    ['encoder.0', 'decoder.0.self', 'decoder.0.cross']
    """
    found = {}
    for n, layer in enumerate(model.encoder):
        found[f"encoder.{n}"] = layer.attention
    for n, layer in enumerate(model.decoder):
        found[f"decoder.{n}.self"] = layer.self_attention
        found[f"decoder.{n}.cross"] = layer.cross_attention
    return found


@torch.no_grad()
def attention_maps(
    model: Translator,
    source: Tensor,  # [..., batch_size]
    target: Tensor,  # [..., batch_size]
    source_lens: Tensor,  # [batch_size]
) -> dict[str, Tensor]:
    r"""The weights of each attention, `[q_len, k_len, batch_size, heads]`, by its name.

    The model must be made of attentions with the parameters of the core.

    >>> model = Translator(vocab_size=11, d_model=8, heads=2)
    >>> source, target = torch.randint(4, 11, (7, 3)), torch.randint(4, 11, (5, 3))
    >>> maps = attention_maps(model, source, target, torch.tensor([7, 5, 1]))
    >>> maps["decoder.0.cross"].shape
    torch.Size([5, 7, 3, 2])
    """
    # The core computes the same as the fast modules, and stores its weights.
    model = copy.deepcopy(model).eval()
    for name, module in [*model.named_modules()]:
        if module in attentions(model).values():
            core = mha.MultiHeadAttention(module.heads, module.output.out_features)
            core.load_state_dict(module.state_dict())
            model.set_submodule(name, core.eval())
    model(source, target, source_lens)
    return {name: module.attn for name, module in attentions(model).items()}


def statistics(
    maps: dict[str, Tensor], source_lens: Tensor, target_lens: Tensor
) -> dict[str, float]:
    r"""Entropy and weight on the diagonal of each head, and all weight on padding.

    They are means over the queries that are no padding. The entropy, in nats, is 0 if
    one key has all of the weight, and $\ln n$ if $n$ keys share it equally. The
    diagonal is the key at the query's own position, in self-attention.

    The weight on padding must be zero. It is not where a mask is missing:

    >>> uniform = {"decoder.0.cross": torch.full((3, 5, 2, 1), 1 / 5)}
    >>> source_lens, target_lens = torch.tensor([5, 4]), torch.tensor([3, 3])
    >>> for name, value in statistics(uniform, source_lens, target_lens).items():
    ...     print(f"{name:26}{value:.3f}")
    entropy.decoder.0.cross.0 1.609
    padding                   0.600
    """
    found: dict[str, float] = {}
    on_padding = 0.0
    for name, weights in maps.items():
        q_len, k_len = weights.shape[:2]
        q_lens = target_lens if name.startswith("decoder") else source_lens
        k_lens = target_lens if name.endswith("self") else source_lens
        is_query = is_token(q_lens, q_len)  # [q_len, batch_size]
        is_padding = ~is_token(k_lens, k_len)  # [k_len, batch_size]
        hidden = (is_query.unsqueeze(1) & is_padding).unsqueeze(-1)  # [q_len, ..., 1]
        on_padding += (weights * hidden).sum().item()
        entropy = torch.special.entr(weights).sum(1)  # [q_len, batch_size, ...]
        for h, value in enumerate(entropy[is_query].mean(0)):
            found[f"entropy.{name}.{h}"] = value.item()
        if not name.endswith("cross"):
            diagonal = weights.diagonal().permute(2, 0, 1)
            for h, value in enumerate(diagonal[is_query].mean(0)):
                found[f"diagonal.{name}.{h}"] = value.item()
    return {**found, "padding": on_padding}


def is_token(
    lengths: Tensor,  # [batch_size]
    length: int,
) -> Tensor:
    """Which positions are no padding, `[length, batch_size]`."""
    return torch.arange(length).unsqueeze(1) < lengths  # [length, batch_size]


def without_head(model: Translator, name: str, head: int) -> Translator:
    r"""A copy of the model in which one head of one attention adds nothing.

    Raises `ValueError` for an attention or a head that the model does not have.

    >>> model = Translator(vocab_size=11, layers=1, d_model=8, heads=2)
    >>> ablated = without_head(model, "decoder.0.cross", 1)
    >>> ablated.decoder[0].cross_attention.output.weight[0] == 0
    tensor([False, False, False, False,  True,  True,  True,  True])
    """
    model, module, components = copy_with_head(model, name, head)
    # The output layer multiplies the context of each head by columns of its own.
    module.output.weight.data[:, components] = 0
    return model


def with_uniform_head(model: Translator, name: str, head: int) -> Translator:
    r"""A copy of the model in which one head weighs all allowed keys equally.

    Raises as `without_head` does.

    >>> model = Translator(vocab_size=11, layers=1, d_model=8, heads=2)
    >>> model = with_uniform_head(model, "encoder.0", 1)
    >>> tokens, length = torch.tensor([[4], [5], [6], [7]]), torch.tensor([4])
    >>> attention_maps(model, tokens, tokens, length)["encoder.0"][0, :, 0, 1]
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    model, module, components = copy_with_head(model, name, head)
    # Queries of zero have equal scores with all keys.
    module.query.linear.weight.data[components] = 0
    module.query.linear.bias.data[components] = 0
    return model


def copy_with_head(
    model: Translator, name: str, head: int
) -> tuple[Translator, Any, slice]:
    """A copy of a model, one of its attentions, and the components of a head."""
    model = copy.deepcopy(model)
    known = attentions(model)
    if name not in known:
        raise ValueError(f"`name` is {name!r}; the model has {', '.join(known)}")
    module = known[name]
    if head not in range(module.heads):
        raise ValueError(f"`head` (={head}) must lie from 0 to {module.heads - 1}")
    return model, module, slice(head * module.d_k, (head + 1) * module.d_k)
