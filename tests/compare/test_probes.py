"""The probes: their findings for each implementation, and for deliberate defects."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headnotes import mha
from headnotes.compare import probes
from headnotes.compare.equivalence import SYSTEMS
from headnotes.implementations import batch_first, causal, valid_lens

SEQUENCE_FIRST = "[seq_len, batch_size, d_model]"
BATCH_FIRST = "[batch_size, seq_len, d_model]"
ZERO = "zero, and all gradients are finite"
BEFORE = "on the weights; shown before it"
HALF = "with a mask; with large scores"
FOUND = {
    "layout": [SEQUENCE_FIRST, BATCH_FIRST, BATCH_FIRST, BATCH_FIRST, SEQUENCE_FIRST],
    "mask": [
        "True: may attend",
        "takes none: always causal",
        "a length: the first so many",
        "True: may attend",
        "True: may not attend",
    ],
    "a masked score lies": ["below -1e30"] * 5,
    "scores times": ["1/√d_k"] * 5,
    "dropout": [
        BEFORE,
        "on the weights",
        BEFORE,
        BEFORE,
        "on the weights; shown after it",
    ],
    "biases by default": ["all four", "output only", "none", "all four", "all four"],
    "initial weights": ["±1/√d_model"] * 4 + ["±√(6/(4 d_model)), biases 0"],
    "returned": [
        SEQUENCE_FIRST,
        BATCH_FIRST,
        BATCH_FIRST,
        f"{BATCH_FIRST}, [batch_size, heads, seq_len, seq_len]",
        f"{SEQUENCE_FIRST}, [batch_size, seq_len, seq_len]",
    ],
    "fully masked row": [
        ZERO,
        "cannot occur",
        ZERO,
        ZERO,
        "NaN, and NaN in the gradients",
    ],
    "float16 works": [HALF] * 5,
    "retained on the module": [
        "attn [seq_len, seq_len, batch_size, heads]",
        "mask [seq_len, seq_len]",
        "attention_weights [batch_size * heads, seq_len, seq_len]",
        "nothing",
        "nothing",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("question", probes.PROBES)
def test_each_probe_finds_the_known_behavior(question: str) -> None:
    found = [probes.PROBES[question](name) for name in SYSTEMS]
    assert found == FOUND[question]


# Defects of the published originals, each put into ours: the probes find them.


@pytest.mark.parametrize(
    ("fill", "deepest", "empty"),
    [
        (-1e6, "below -1e5", "the mean of all values, and all gradients are finite"),
        (-1e10, "below -1e9", "the mean of all values, and all gradients are finite"),
        (-math.inf, "below -1e30", "NaN, and NaN in the gradients"),
    ],
)
def test_another_fill_value_is_found(
    monkeypatch: pytest.MonkeyPatch, fill: float, deepest: str, empty: str
) -> None:
    def softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
        scores = scores if mask is None else scores.masked_fill(~mask, fill)
        return scores.softmax(dim=1)

    monkeypatch.setattr(mha, "masked_softmax", softmax)
    assert probes.fill_value("core") == deepest
    assert probes.fully_masked_row("core") == empty


def test_a_fill_value_that_overflows_float16_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def softmax(scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(~mask, -1e10).softmax(dim=1)

    monkeypatch.setattr(mha, "masked_softmax", softmax)
    assert probes.half_precision("core") == "no"


def test_scores_that_overflow_float16_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scaled_late = mha.MultiHeadAttention.get_scores
    monkeypatch.setattr(
        mha.MultiHeadAttention,
        "get_scores",
        lambda self, query, key: (
            scaled_late(self, query / self.scale, key) * self.scale
        ),
    )
    assert probes.half_precision("core") == "with a mask"


def test_an_inverted_mask_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = mha.MultiHeadAttention.prepare_mask
    monkeypatch.setattr(
        mha.MultiHeadAttention, "prepare_mask", lambda *given: ~prepare(*given)
    )
    assert probes.mask_polarity("core") == "True: may not attend"


def test_an_ignored_mask_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        mha, "masked_softmax", lambda scores, mask: scores.softmax(dim=1)
    )
    assert probes.mask_polarity("core") == "given True, query 1 attends to [0, 1, 2]"
    assert probes.fill_value("core") == "nothing"


def test_another_scale_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    get_scores = mha.MultiHeadAttention.get_scores
    monkeypatch.setattr(
        mha.MultiHeadAttention, "get_scores", lambda *given: 2 * get_scores(*given)
    )
    assert probes.scale("core") == "2.000, 2.000, 2.000 / √d_k"


def test_dropout_that_is_never_applied_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nn.Dropout, "forward", lambda self, x: x)
    assert probes.dropout("core") == "nowhere"


def test_dropout_without_rescaling_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def drop(self: nn.Dropout, x: Tensor) -> Tensor:
        return x * (torch.rand_like(x) < 0.5) if self.training else x

    monkeypatch.setattr(nn.Dropout, "forward", drop)
    assert probes.dropout("core").startswith("elsewhere (times 0.0, 1.0)")


def test_stored_weights_with_their_graph_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Tensor, "detach", lambda self: self)
    assert "with its graph" in probes.retained_tensors("core")


def test_a_mask_in_checkpoints_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    register = nn.Module.register_buffer

    def persistent(self: Any, name: str, tensor: Any, **_: Any) -> None:
        register(self, name, tensor)

    monkeypatch.setattr(nn.Module, "register_buffer", persistent)
    assert probes.retained_tensors("causal").endswith("; mask in checkpoints")


def test_another_initialization_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def small(self: nn.Linear) -> None:
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)

    monkeypatch.setattr(nn.Linear, "reset_parameters", small)
    assert probes.initialization("core") not in FOUND["initial weights"]
    assert probes.initialization("core").endswith("biases 0")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("core", mha.MultiHeadAttention),
        ("causal", causal.MultiHeadAttention),
        ("valid_lens", valid_lens.MultiHeadAttention),
        ("batch_first", batch_first.MultiHeadAttention),
        ("torch", nn.MultiheadAttention),
    ],
)
def test_each_implementation_is_initialized_as_in_its_source(
    name: str, kind: type[nn.Module]
) -> None:
    module = probes.default_module(name)
    assert type(module) is kind
    assert all(p.shape for p in module.parameters())
