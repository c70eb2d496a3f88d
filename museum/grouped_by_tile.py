"""Grouped-query attention: `repeat` in place of `repeat_interleave`

Symptom: A checkpoint with grouped queries loads without an error, and generates
nonsense. Checkpoints without groups work.

Bug: With 6 query heads and 2 key heads, query heads 0, 1 and 2 belong to key head 0.
The repeated key heads must be 0, 0, 0, 1, 1, 1, and `repeat` gives 0, 1, 0, 1, 0, 1.

Unseen: The shapes are the same, and so are the numbers with one key head, or with as
many as there are query heads. Trained from scratch, either order learns: only weights
from elsewhere show the difference.

Thread: https://github.com/ekzhang/jax-js/pull/180 (2026): “not tested well enough”. The
[definition in ONNX](https://github.com/onnx/onnx/pull/7274) had the same order.
"""

import math

LAW = "formula"
OPTIONS = {"kv_heads": 2}
FIX = [
    ("key.repeat(1, groups, 1, 1)", "key.repeat_interleave(groups, dim=1)"),
    ("value.repeat(1, groups, 1, 1)", "value.repeat_interleave(groups, dim=1)"),
]


def attention(query, key, value):
    groups = query.shape[1] // key.shape[1]
    key = key.repeat(1, groups, 1, 1)
    value = value.repeat(1, groups, 1, 1)
    scores = query / math.sqrt(query.shape[-1]) @ key.transpose(-2, -1)
    return scores.softmax(dim=-1) @ value
