"""What every variant does: padding, copies, half precision, and the laws."""

import copy
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_laws import LAWS, check
from claims import BATCH, K_LEN, inputs, some_mask
from contract import randomize
from headnotes.mha import MultiHeadAttention
from headnotes.variants import sliding_window
from headnotes.variants.alibi import AlibiAttention
from headnotes.variants.differential import DifferentialAttention
from headnotes.variants.grouped_query import GroupedQueryAttention
from headnotes.variants.latent import LatentAttention
from headnotes.variants.linear import DeltaNetAttention, LinearAttention
from headnotes.variants.qk_norm import QKNormAttention
from headnotes.variants.relative import (
    ShawAttention,
    T5Attention,
    TransformerXLAttention,
)
from headnotes.variants.rotary import RotaryAttention
from headnotes.variants.sinks import SinkAttention
from headnotes.variants.sliding_window import SlidingWindowAttention
from headnotes.variants.soft_cap import SoftCapAttention

VARIANTS: dict[str, Callable[[], Any]] = {
    "delta rule": lambda: DeltaNetAttention(2, 6, chunk_size=2),
    "differential": lambda: DifferentialAttention(2, 12),
    "linear": lambda: LinearAttention(2, 6, chunk_size=2),
    "query-key norm": lambda: QKNormAttention(2, 6, over="all"),
    "sinks": lambda: SinkAttention(2, 6),
    "sliding window": lambda: SlidingWindowAttention(2, 6, window=2, sink_tokens=1),
    "soft cap": lambda: SoftCapAttention(2, 6, soft_cap=5.0),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows have blocks of one position and more, so short sequences have many."""
    monkeypatch.setattr(sliding_window, "LEAST_BLOCK", 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_padding_copies_meta_vmap_and_compile_work(name: str) -> None:
    module = VARIANTS[name]()
    randomize(module)
    module = module.eval()
    xs = {name: x.float() for name, x in inputs(module.output.in_features).items()}
    before = {name: x.clone() for name, x in xs.items()}
    mask = torch.ones(1, K_LEN, BATCH).bool()
    mask[:, 3:, 1] = False
    mask[:, :, 0] = False
    output = module(**xs, mask=mask)
    assert torch.equal(output[:, 0], module.output.bias.expand_as(output[:, 0]))
    assert all(torch.equal(x, before[name]) for name, x in xs.items())

    padded = {name: x.clone() for name, x in xs.items()}
    for name in ("key", "value"):
        padded[name][3:, 1] = torch.nan
    again = module(**padded, mask=mask)
    torch.testing.assert_close(again, output)
    again.sum().backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())
    module.zero_grad()

    torch.testing.assert_close(copy.deepcopy(module)(**xs, mask=mask), output)
    meta = copy.deepcopy(module).to("meta")
    on_meta = {name: x.to("meta") for name, x in xs.items()}
    assert meta(**on_meta, mask=mask.to("meta")).shape == output.shape

    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**xs, mask=mask), output)

    def one(*xs: Tensor) -> Any:
        query, key, value = xs
        return module(query=query, key=key, value=value)

    stacked = [torch.stack([x, x.flip(1)]) for x in xs.values()]
    expected = torch.stack([one(*xs.values()), one(*(x.flip(1) for x in xs.values()))])
    torch.testing.assert_close(torch.vmap(one)(*stacked), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
# The delta rule, whose mask has one row, is tested on a long sequence elsewhere.
@pytest.mark.parametrize("name", sorted(VARIANTS.keys() - {"delta rule"}))
def test_half_precision_is_near(name: str, dtype: torch.dtype) -> None:
    # The norm of differential attention divides by what may be small.
    roundings = 60 if name == "differential" else 20
    module = VARIANTS[name]()
    randomize(module)
    module = module.to(dtype).eval()
    wide = copy.deepcopy(module).double()
    xs = {n: x.to(dtype) for n, x in inputs(module.output.in_features).items()}
    mask = some_mask()
    output = module(**xs, mask=mask)
    expected = wide(**{n: x.double() for n, x in xs.items()}, mask=mask)
    assert output.dtype == dtype
    near = roundings * torch.finfo(dtype).eps * float(expected.detach().abs().max())
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=near)
    output.sum().backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())


# What the checker cannot find out by itself. "rotary" stands for any encoding in which
# only distances matter.
RELATIVE = {"positions": "rotary"}
ALWAYS_CAUSAL = {"causal": True, "weights": "none"}
CHECKED: dict[type, dict[str, Any]] = {
    AlibiAttention: {"positions": "alibi"},
    DeltaNetAttention: {"mask": {"mask": "attend:1kb"}, **ALWAYS_CAUSAL},
    DifferentialAttention: {},
    GroupedQueryAttention: {"heads": 4, "kv_heads": 2},
    LatentAttention: {"init_args": {"kv_rank": 5, "rotary_dim": 2}, **RELATIVE},
    LinearAttention: {},
    QKNormAttention: {},
    RotaryAttention: RELATIVE,
    ShawAttention: RELATIVE,
    SinkAttention: {},
    SlidingWindowAttention: {
        "mask": {"mask": "attend:qkb"},
        "init_args": {"window": 2},
        "window": 2,
        **ALWAYS_CAUSAL,
    },
    SoftCapAttention: {"init_args": {"soft_cap": 0.5}},
    T5Attention: RELATIVE,
    TransformerXLAttention: RELATIVE,
}
EXCEPTIONS = re.compile(
    r"[Oo]f the laws that the core passes, all (?:but ([^:]*?) )?apply"
)


# Each is compiled whole by the first test here, or by that of the contract.
@pytest.fixture(scope="module")
def passed_by_the_core() -> set[str]:
    report = check(MultiHeadAttention, skip="compiled")
    return {result.law.name for result in report.passed}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHECKED, ids=lambda kind: kind.__name__)
def test_the_page_says_which_laws_apply_and_these_pass(
    kind: type, passed_by_the_core: set[str]
) -> None:
    report = check(kind, skip="compiled", **CHECKED[kind])
    assert report.ok, report
    passed = {result.law.name for result in report.passed}

    page = str(sys.modules[kind.__module__].__doc__)
    [paragraph] = re.findall(r"\*\*Laws\.\*\*.*?(?=\n\n)", page, re.DOTALL)
    text = " ".join(paragraph.split())
    claims = [law_names(each) for each in EXCEPTIONS.findall(text)]
    # The delta rule is the second attention of its page.
    assert passed_by_the_core - passed == claims[kind is DeltaNetAttention]
    assert law_names(text) - set().union(*claims) <= passed


def law_names(text: str) -> set[str]:
    """The laws that a text names as code."""
    return set(re.findall(r"`(\w+)`", text)) & LAWS.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (DeltaNetAttention, CHECKED[DeltaNetAttention]),
        (
            LatentAttention,
            {"init_args": {"kv_rank": 5, "rotary_dim": 2, "norm": False}, **RELATIVE},
        ),
    ],
)
def test_linear_in_value_passes_if_the_checker_insists(
    kind: type, options: dict[str, Any]
) -> None:
    report = check(kind, only="linear_in_value", **options)
    assert [result.law.name for result in report.passed] == ["linear_in_value"], report


# Each as the code on its page builds it in `fast`.
AT_FULL_SPEED: list[Callable[[], Any]] = [
    lambda: AlibiAttention(3, 42),
    lambda: GroupedQueryAttention(6, 42, kv_heads=2),
    lambda: QKNormAttention(3, 42, norm="layer", over="all"),
    lambda: RotaryAttention(3, 42),
    lambda: SinkAttention(3, 42),
    lambda: SlidingWindowAttention(3, 42, window=3),
    lambda: SoftCapAttention(3, 42, soft_cap=2.0),
    lambda: T5Attention(3, 42),
]


@pytest.mark.parametrize("build", AT_FULL_SPEED)
def test_the_code_on_the_page_gives_the_same_at_full_speed(
    build: Callable[[], Any],
) -> None:
    module = build()
    randomize(module)
    [code] = re.findall(
        r"```python\n(.*?)```", sys.modules[type(module).__module__].__doc__ or "", re.S
    )
    scope: dict[str, Any] = {}
    exec(code, scope)
    quick, module = scope["quick"].double().eval(), module.double().eval()
    state = {
        name.replace("relative_bias", "score_bias"): weight
        for name, weight in module.state_dict().items()
    }
    quick.load_state_dict(state)
    xs = inputs(42, 5, 7)
    options = {"is_causal": True} if hasattr(module, "window") else {}
    mask = torch.ones(1, 7, BATCH).bool()
    mask[:, :2, 1] = False
    output = quick(**xs, mask=mask, **options)
    torch.testing.assert_close(output, module(**xs, mask=mask), rtol=0, atol=1e-12)
