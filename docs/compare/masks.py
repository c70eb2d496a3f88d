# %% [markdown]
# # Mask converter
#
# This page converts an attention mask between the conventions of PyTorch
# (`nn.MultiheadAttention`, `scaled_dot_product_attention`, FlexAttention), Keras, Hugging
# Face, FlashAttention and d2l. Paint a mask, or paste one as it was printed. The page
# shows it in each convention, or why the convention cannot represent it. Rows are
# queries, columns are keys, and 1 means *may attend*. The address keeps the mask, so that
# you can share it.

# %% hide="true"
import re
from html import escape
from json import dumps

import torch
from IPython.display import Markdown, display
from matplotlib import colormaps
from torch.nn.attention.flex_attention import BlockMask

from headnotes import masks
from headnotes.mha import masked_softmax

HEADS = 2
RULE = "lambda b, h, q, k: mask[q, k, b]"
PRESETS = ("causal", "causal, top left", "padding", "sliding window", "prefix LM")
PRESETS += ("packed documents", "all", "none")

# Each convention in a row: how it writes a mask, and how to convert to it and from it.
FIELDS = ["key", "name", "may", "hides", "axes", "dtype", "heads", "there", "back"]
TABLE = """
ours | Headnotes | True | False | [q_len or 1, k_len, batch_size or 1] | bool | broadcast | |
mha | `nn.MultiheadAttention`, `attn_mask` | **False** | **True** | [q_len, k_len] or [batch_size * heads, q_len, k_len] | bool | you repeat it | attn_mask = masks.to_mha(mask, heads=HEADS) | masks.from_mha(attn_mask, heads=HEADS)
mha-float | `nn.MultiheadAttention`, `attn_mask`, additive | 0.0 | −inf | [q_len, k_len] or [batch_size * heads, q_len, k_len] | as the query | you repeat it | attn_mask = masks.to_mha(mask, heads=HEADS, dtype=torch.float32) | masks.from_mha(attn_mask, heads=HEADS)
key-padding | `nn.MultiheadAttention`, `key_padding_mask` | **False** | **True** | [batch_size, k_len] | bool | repeated by the library | key_padding_mask = masks.to_key_padding_mask(mask) | masks.from_key_padding_mask(key_padding_mask)
sdpa | `F.scaled_dot_product_attention`, `attn_mask` | True | False | [batch_size or 1, heads or 1, q_len or 1, k_len] | bool | broadcast | attn_mask = masks.to_sdpa(mask) | masks.from_sdpa(attn_mask)
sdpa-float | `F.scaled_dot_product_attention`, `attn_mask`, additive | 0.0 | −inf | [batch_size or 1, heads or 1, q_len or 1, k_len] | as the query | broadcast | attn_mask = masks.to_sdpa(mask, dtype=torch.float32) | masks.from_sdpa(attn_mask)
is-causal | `F.scaled_dot_product_attention`, `is_causal` | the top-left triangle | the rest | a flag | bool | repeated by the library | is_causal = masks.to_is_causal(mask) | masks.causal(Q_LEN, K_LEN, corner="top left")
mask-mod | FlexAttention, `mask_mod` | True | False | mask_mod(b, h, q, k) | bool | the function is called for each | mask_mod = masks.to_mask_mod(mask) | masks.from_mask_mod(mask_mod, Q_LEN, K_LEN, BATCH_SIZE)
block-mask | FlexAttention, `block_mask` | True | False | mask_mod(b, h, q, k), and blocks of 128 by 128 | bool | broadcast | block_mask = masks.to_block_mask(mask) | masks.from_block_mask(block_mask)
keras | Keras, `attention_mask` | True | False | [batch_size or 1, q_len or 1, k_len] | bool | repeated by the library | attention_mask = masks.to_keras(mask) | masks.from_keras(attention_mask)
key-mask | Keras, `key_mask` and `value_mask` | True | False | [batch_size, k_len] | bool | repeated by the library | key_mask = masks.to_key_mask(mask) | masks.from_key_mask(key_mask)
huggingface-keys | Hugging Face, `attention_mask` | 1 | 0 | [batch_size, k_len] | integer | repeated by the library | attention_mask = masks.to_key_mask(mask).long() | masks.from_huggingface(attention_mask)
huggingface | Hugging Face, `attention_mask` of four axes | 0.0 | the lowest finite number | [batch_size, 1, q_len, k_len] | as the model | broadcast | attention_mask = masks.to_huggingface(mask) | masks.from_huggingface(attention_mask)
valid-lens | d2l, `valid_lens` | the first keys | the rest | [batch_size] or [batch_size, q_len] | integer | repeated by the library | valid_lens = masks.to_valid_lens(mask) | masks.padding(valid_lens, k_len=K_LEN)
cu-seqlens | FlashAttention, `cu_seqlens` | keys of the same document | the rest | [documents + 1], for queries and for keys | int32 | repeated by the library | cu_seqlens = masks.to_cu_seqlens(mask) | masks.from_cu_seqlens(*cu_seqlens)
"""
ROWS = [re.split(r"\s*\|\s*", line) for line in TABLE.strip().split("\n")]
CONVENTIONS = [dict(zip(FIELDS, row, strict=True)) for row in ROWS]

# %% hide="true"
# The worked example; the script of the page starts from it.
EXAMPLE = "masks.padding(torch.tensor([5, 3]), k_len=5)"
mask = eval(EXAMPLE).repeat(3, 1, 1)
torch.manual_seed(2017)
queries, keys = torch.randn(8, 3, 4), torch.randn(8, 3, 4)
scores = (torch.einsum("ibd,jbd->ijb", queries, keys) / 4**0.5).round(decimals=2)


def nested(value, pad):
    """Nested lists, the rows of the innermost below one another."""
    if not isinstance(value, list):
        return value
    joint = ", " if not value or isinstance(value[0], str) else f",\n{' ' * (pad + 1)}"
    return f"[{joint.join(nested(each, pad + 1) for each in value)}]"


def literal(value):
    """A value as code that makes it: short, so that rows can be compared by eye."""
    if isinstance(value, bool):
        return f"{value}"
    if isinstance(value, tuple):
        return f"({f',{chr(10)} '.join(map(literal, value))})"
    if isinstance(value, BlockMask):
        sizes = ", ".join(map(str, value.shape)).replace(", 1,", ", None,", 1)
        return f'create_block_mask(\n    {RULE}, {sizes}, "cpu")'
    if not isinstance(value, torch.Tensor):
        return RULE
    additive = value.is_floating_point()

    def said(x):
        if isinstance(x, list):
            return [said(each) for each in x]
        return f"{int(x)}" if not additive else "low" if x else " 0."

    kind = {torch.bool: ".bool()", torch.int32: ".int()"}.get(value.dtype, "")
    code = f"torch.tensor({nested(said(value.tolist()), len('torch.tensor('))}){kind}"
    low = "-torch.inf" if value.isinf().any() else "torch.finfo(torch.float32).min"
    return f"low = {low}\n{code}" if additive else code


# %% hide="true"
def marked(text):
    """HTML of a text: code between backticks, bold type between asterisks."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)


def grid(rows, caption):
    """A table with numbered rows and columns, of cells that are HTML already."""
    head = "".join(f'<th scope="col">{k}</th>' for k in range(len(rows[0])))
    body = "".join(
        f'<tr><th scope="row">{q}</th>{"".join(row)}</tr>' for q, row in enumerate(rows)
    )
    return (
        f'<table class="mk-grid"><caption>{caption}</caption>'
        f"<thead><tr><td></td>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def allowed(may):
    """A cell of the mask: 1 or 0, so that color is not all that tells them apart."""
    return f'<td><span class="mk-cell mk-{int(may)}">{int(may)}</span></td>'


def shared(weight):
    """A weight, and its color in cividis, which color-blind readers can tell apart."""
    red, green, blue = (round(255 * part) for part in colormaps["cividis"](weight)[:3])
    ink = "#000" if weight > 0.46 else "#fff"
    style = f"background: rgb({red}, {green}, {blue}); color: {ink}"
    number = f"{weight:.2f}" if weight % 1 else f"{weight:.0f}"
    return f'<td><span class="mk-weight" style="{style}">{number}</span></td>'


def items():
    """For each batch item the mask, and the weights that it leaves."""
    _, k_len, batch_size = mask.shape
    weights = masked_softmax(scores[:3, :k_len, :batch_size, None], mask[..., None])
    return "".join(
        "<div>"
        + grid([[allowed(x) for x in row] for row in mask[..., b]], f"mask, item {b}")
        + grid(
            [[shared(x) for x in row] for row in weights[..., b, 0].tolist()],
            f"weights, item {b}",
        )
        + "</div>"
        for b in range(batch_size)
    )


def card(of):
    """One convention: what its values mean, how to convert, and the mask in it."""
    sizes = dict(zip(["Q_LEN", "K_LEN", "BATCH_SIZE"], mask.shape, strict=True))
    sizes["HEADS"] = HEADS
    calls, value, refusal = "", f"{literal(mask.permute(2, 0, 1))}.permute(1, 2, 0)", ""
    if of["there"]:
        _, _, expression = of["there"].partition(" = ")
        calls = escape(f"{of['there']}\nmask = {of['back']}", quote=False)
        for size, number in sizes.items():
            expression = expression.replace(size, f"{number}")
            span = f'<span data-size="{size.lower()}">{number}</span>'
            calls = calls.replace(size, span)
        calls = f"<pre><code>{calls}</code></pre>"
        try:
            value = literal(eval(expression))
        except ValueError as error:
            value, refusal = "", marked(str(error))
    none, given = (" hidden", "") if refusal else ("", " hidden")
    return (
        f'<section class="mk-card" data-convention="{of["key"]}">'
        f"<h2>{marked(of['name'])}</h2>"
        f"<p>May attend: {marked(of['may'])}. Hidden: {marked(of['hides'])}."
        f'<button type="button" hidden>Copy</button></p>{calls}'
        f'<div class="mk-value" role="group" aria-label="value"{none}>'
        f"<pre><code>{value}</code></pre></div>"
        f'<p class="mk-refusal"{given}>{refusal}</p></section>'
    )


def slider(name, low, high, value):
    """A size: its value, and a slider that is hidden until the script runs."""
    return (
        f'<label>{name} <input type="range" name="{name}" min="{low}" max="{high}" '
        f'value="{value}" hidden><output data-size="{name}">{value}</output></label>'
    )


def text_of(mask):
    """Rows of 0 and 1, batch items behind a slash."""
    rows = mask.permute(2, 0, 1).int().tolist()
    return " / ".join(" ".join("".join(map(str, row)) for row in item) for item in rows)


def converter():
    """The page before its script runs: complete, for one mask."""
    q_len, k_len, batch_size = mask.shape
    sliders = slider("q_len", 1, 8, q_len) + slider("k_len", 1, 8, k_len)
    sliders += slider("batch_size", 1, 3, batch_size) + slider("heads", 1, 4, HEADS)
    presets = "".join(
        f'<button type="button" hidden>{name}</button>' for name in PRESETS
    )
    words = "".join(
        f"<li>{escape(line)}</li>" for line in masks.describe(mask).split("\n")
    )
    cards = "".join(map(card, CONVENTIONS))
    data = dumps(scores.permute(2, 0, 1).tolist(), separators=(",", ":"))
    return (
        '<div class="mk">'
        f'<script type="application/json">{data}</script>'
        '<div class="mk-left">'
        '<p class="mk-paste"><label for="mk-text">Mask as text: edit it, or paste a '
        "tensor, array or list</label>"
        '<textarea id="mk-text" rows="2" readonly spellcheck="false" autocomplete="off" '
        f'aria-describedby="mk-status">{text_of(mask)}</textarea></p>'
        '<p class="mk-status" id="mk-status" role="status"></p>'
        '<div class="mk-questions"></div>'
        f'<form aria-label="Mask"><p class="mk-presets">{presets}</p>'
        f'<p class="mk-sizes">{sliders}</p>'
        '<p class="mk-tools"><button type="button" class="mk-undo" title="Ctrl+Z" hidden '
        "disabled>Undo</button></p></form>"
        f'<div class="mk-items">{items()}</div>'
        '<p class="mk-facts"><span>Headnotes</span> '
        f'<code class="mk-named">{EXAMPLE}</code></p>'
        '<div class="mk-facts"><span>Description</span>'
        f'<ul class="mk-words">{words}</ul></div></div>'
        f'<div class="mk-cards">{cards}</div>'
        '<script defer src="../assets/elements.js"></script>'
        '<script defer src="../assets/masks.js"></script></div>'
    )


display(Markdown(converter()))

# %% [markdown]
# ## Mask conventions compared
#
# *May attend* and *hidden* are the values that a mask holds for a key that a query may or
# may not attend to; *heads* says whether the library repeats the mask for each head. The
# functions that convert are in [mask conventions](../source/masks/conventions.md) and
# [FlexAttention masks](../source/masks/flex.md); the description above comes from
# [`masks.describe`](../source/masks/describe.md).

# %% hide="true"
lines = [
    "| convention | may attend | hidden | axes | dtype | heads |",
    "|---" * 6 + "|",
]
for of in CONVENTIONS:
    axes = re.sub(r"(\[.+?\]|mask_mod\(.+?\))", r"`\1`", of["axes"])
    cells = [of[field] for field in ("name", "may", "hides")]
    lines.append("| " + " | ".join([*cells, axes, of["dtype"], of["heads"]]) + " |")
display(Markdown("\n".join(lines)))
