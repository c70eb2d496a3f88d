r"""# Running models of Hugging Face Transformers

`register()` makes [`fast.attention`](../fast/attention.md) an attention implementation
of `transformers`, beside `"eager"` and `"sdpa"`. It is for those who want to run, train
or measure a whole model with this kernel. Transformers 4.57 is required, or 5.5 and
newer. Two models need a later release: BERT 5.5, and T5 5.16. A model that offers no
choice of implementations, as these do not in 4.57, refuses to be built with ours.

```python
from headnotes.integrations import transformers as integration
from transformers import AutoModelForCausalLM

integration.register()
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="headnotes")
```

Masks, caches, positions and `generate` remain those of the library, so models with
padding on the left, growing or static caches and packed sequences work. A model passes
its projected queries, keys and values to the function `attention_forward`; for
grouped-query attention, keys and values have fewer heads and are not repeated. A
sliding window is part of the mask. Where a whole sequence is processed at once, and the
mask allows no key outside of the window, the kernel gets the window, too, and computes
no scores outside of it.

To compute a layer with our modules instead, convert its weights:
[`convert.from_transformers`](../convert.md#from_transformers).

Source: [Attention
backends](https://huggingface.co/docs/transformers/attention_interface), the interface
of the library.
"""

from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from headnotes.architectures import SINCE, scale_of
from headnotes.checks import check_version
from headnotes.fast.attention import attention

# Arguments of some models that select keys in another way than by a mask. In
# Transformers 4, a `head_mask` multiplies the weights of each head.
UNSUPPORTED = ("cache", "indices", "block_indices", "sinks", "head_mask")


def register() -> None:
    r"""Register the attention implementation `"headnotes"` in `transformers`.

    Raises `ImportError` if `transformers` is not installed, or another release than
    4.57, or 5.5 and newer. BERT needs 5.5 and T5 5.16. A model that offers no choice of
    implementations then raises `ValueError` if it is built with `"headnotes"`.

    The next tokens of a tiny Llama with random weights, after two prompts of which the
    second has two tokens of padding on the left:

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> register()
    >>> sizes = {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 3}
    >>> sizes |= {"num_hidden_layers": 2, "intermediate_size": 7, "vocab_size": 97}
    >>> config = LlamaConfig(**sizes, initializer_range=0.3, eos_token_id=None)
    >>> model = LlamaForCausalLM(config).eval()
    >>> prompts = torch.tensor([[5, 3, 2, 11], [0, 0, 7, 13]])
    >>> options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    >>> options["attention_mask"] = prompts > 0
    >>> tokens = {}
    >>> for name in ("eager", "headnotes"):
    ...     model.set_attn_implementation(name)
    ...     tokens[name] = model.generate(prompts, **options)
    >>> torch.equal(tokens["headnotes"], tokens["eager"])
    True
    """
    check_version("`register`", "transformers", *SINCE)
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("headnotes", attention_forward)
    # It returns a bool mask, True = may attend, or None where causality says it all.
    AttentionMaskInterface.register("headnotes", sdpa_mask)
    refuse_models_without_choice()


def refuse_models_without_choice() -> None:
    """Make models that offer no choice of implementations refuse ours.

    Transformers only checks that the name is registered, and T5 in 4.57 ignores it.
    """
    from transformers import PreTrainedModel

    original = PreTrainedModel.get_correct_attn_implementation
    if original.__module__ == __name__:
        return

    def checked(model: Any, name: str | None, *args: Any, **options: Any) -> Any:
        if name == "headnotes" and not model._can_set_attn_implementation():
            raise ValueError(
                f"{type(model).__name__} offers no choice of attention implementations "
                f'in transformers {version("transformers")}; use "eager", or update '
                f"transformers"
            )
        return original(model, name, *args, **options)

    PreTrainedModel.get_correct_attn_implementation = checked


def attention_forward(
    module: nn.Module,
    query: Tensor,  # [batch_size, heads, q_len, d_k]
    key: Tensor,  # [batch_size, kv_heads, k_len, d_k]
    value: Tensor,  # [batch_size, kv_heads, k_len, d_v]
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    output_attentions: bool | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    r"""Scaled dot-product attention with the signature that `transformers` calls.

    Returns the context, `[batch_size, q_len, heads, d_v]`, and, with
    `output_attentions`, the weights before dropout, `[batch_size, heads, q_len,
    k_len]`. `attention_mask` is bool, `[batch_size, 1, q_len, k_len]`. Without a mask,
    `is_causal` decides, or the attribute `is_causal` of `module`. `s_aux`, `[heads]`,
    are sinks; `position_bias`, `[1 or batch_size, heads, q_len, k_len]`, is added to
    the scores. Other arguments are ignored, as they repeat what the mask says.

    Raises `ValueError` for an argument that selects keys in a way that a mask does not
    say, `TypeError` for a floating-point mask.

    >>> import torch
    >>> layer = nn.Module()
    >>> query, key = torch.randn(2, 6, 5, 8), torch.randn(2, 3, 5, 8)
    >>> value = torch.randn(2, 3, 5, 7)
    >>> context, _ = attention_forward(layer, query, key, value, None, is_causal=True)
    >>> context.shape
    torch.Size([2, 5, 6, 7])
    >>> torch.allclose(context[:, 0, ::2], value[:, :, 0])
    True

    The bias of the scores here hides nearly all but the first key:

    >>> bias = torch.tensor([99.0, 0, 0, 0, 0]).expand(1, 6, 4, 5)
    >>> options = {"position_bias": bias, "output_attentions": True}
    >>> options |= {"is_causal": False}
    >>> inputs = query[:, :, :4], key, value, None
    >>> _, weights = attention_forward(layer, *inputs, **options)
    >>> weights[1, 3, 2].round()
    tensor([1., 0., 0., 0., 0.])

    A prompt of four tokens in a static cache of five slots, the last one unused:

    >>> _, weights = attention_forward(layer, *inputs, output_attentions=True)
    >>> (weights[1, 3] > 0).int()
    tensor([[1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [1, 1, 1, 0, 0],
            [1, 1, 1, 1, 0]], dtype=torch.int32)
    """
    check_options(module, others)
    q_len, k_len = query.shape[2], key.shape[2]
    mask = None
    if attention_mask is not None:
        check_mask(attention_mask, query, key)
        mask = attention_mask[:, 0].permute(1, 2, 0)  # [q_len, k_len, batch_size]
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = None
    if is_causal and attention_mask is not None:
        # The mask includes causality, and most often the window.
        window = window_of(attention_mask, sliding_window)
        is_causal = window is not None
    # Without a mask, a single query attends to all keys.
    is_causal = bool(is_causal) and q_len > 1
    if is_causal and k_len > q_len:
        # A static cache that holds the prompt so far. The other slots are unused.
        key = key[:, :, :q_len]  # [batch_size, kv_heads, q_len, d_k]
        value = value[:, :, :q_len]  # [batch_size, kv_heads, q_len, d_v]
    bias = None
    if position_bias is not None:
        bias = position_bias[..., : key.shape[2]].permute(
            2, 3, 0, 1
        )  # [q_len, k_len, ..., heads]
    # Sequence first.
    context, weights = attention(
        query.permute(2, 0, 1, 3),
        key.permute(2, 0, 1, 3),
        value.permute(2, 0, 1, 3),
        mask=mask,
        is_causal=is_causal,
        window=window,
        scale=scale_of(module, query.shape[-1]) if scaling is None else scaling,
        soft_cap=softcap,
        bias=bias,
        sinks=s_aux,
        dropout=nn.Dropout(dropout) if dropout else None,
        need_weights=bool(output_attentions),
    )  # [q_len, batch_size, heads, d_v], [q_len, ..., batch_size, heads]
    if weights is not None:
        weights = weights.permute(2, 3, 0, 1)  # [batch_size, heads, q_len, ...]
        if unused := k_len - weights.shape[-1]:
            weights = F.pad(weights, [0, unused])  # [batch_size, heads, q_len, k_len]
    context = context.transpose(0, 1).contiguous()  # [batch_size, q_len, heads, d_v]
    return context, weights


def window_of(mask: Tensor, window: int | None) -> int | None:
    """The window if the mask allows no key outside of it, as far as this is known.

    A model passes the window of its configuration with any mask: one of the caller may
    be wider, and that of OLMoE has no window. With a cache, the last query need not be
    at the position of the last key: a static cache has unused slots at its end. In some
    models the tokens of an image attend to one another, also to later ones and outside
    of the window.

    >>> causal = torch.ones(2, 1, 5, 5).bool().tril()
    >>> window_of(causal, 3), window_of(causal.triu(-2), 3)
    (None, 3)
    """
    length = mask.shape[-1]
    if window is None or mask.shape[-2] != length:
        return None
    # A compiled graph cannot depend on values.
    if torch.compiler.is_compiling():
        return None
    window = min(window, length)
    # In rows that are one longer than those of the mask, each diagonal is a column: the
    # key d after its query is in column d, the key d before it in column -d. Nothing is
    # copied, and `any` of bytes takes a twentieth of the time of `any` of bool.
    rows = mask.flatten(1)[:, :-1]  # [batch_size, (length - 1) * (length + 1)]
    diagonals = rows.view(len(rows), length - 1, length + 1)  # [batch_size, ...]
    outside = diagonals[..., 1 : length + 2 - window]  # [batch_size, length - 1, ...]
    # The last columns also hold the keys that are farthest after their queries.
    corner = mask[..., : window - 1, length + 2 - window :].triu()  # [batch_size, ...]
    if any(part.view(torch.uint8).any() for part in (outside, corner)):
        return None
    return window


def check_options(module: nn.Module, options: dict[str, Any]) -> None:
    """Refuse an argument that selects keys in a way that a mask does not say."""
    for name in UNSUPPORTED:
        if options.get(name) is not None:
            raise ValueError(
                f'"headnotes" does not support `{name}`; use `attn_implementation='
                f'"eager"` for {type(module).__name__}'
            )


def check_mask(mask: Tensor, query: Tensor, key: Tensor) -> None:
    """Refuse a mask that is not bool, or differs between heads.

    `eager` adds any other mask to the scores, also one of integers.
    """
    if mask.dtype != torch.bool:
        raise TypeError(
            f"`attention_mask` is {mask.dtype}, not bool; compare it with zero, or "
            f"pass the padding mask [batch_size, k_len] to the model"
        )
    expected = (query.shape[0], 1, query.shape[2], key.shape[2])
    if tuple(mask.shape) != expected:
        raise ValueError(
            f"`attention_mask` has shape {list(mask.shape)}, not [batch_size, 1, "
            f"q_len, k_len] = {list(expected)}; a mask for each head needs "
            f'`attn_implementation="eager"`'
        )
