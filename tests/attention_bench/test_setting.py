"""A setting: its tensors, and the work that it needs."""

import json
import re

import pytest
import torch

from attention_bench.setting import Setting


def test_pairs_are_those_that_the_mask_allows() -> None:
    for mask in ("none", "causal", "padding"):
        setting = Setting(3, 7, mask)
        keep = setting.attention_mask()
        allowed = torch.ones(7, 7, 3) if keep is None else keep.expand(7, 7, 3)
        assert setting.pairs() == int(allowed.sum())


def test_flops_agree_with_a_count_by_hand() -> None:
    # 2 sequences of 3 tokens of width 10: four projections of 10 by 10, two products.
    forward = 4 * (2 * 6 * 10 * 10) + 2 * (2 * 2 * 3 * 3 * 10)
    assert Setting(2, 3, d_model=10, heads=5).flops() == forward
    assert Setting(2, 3, d_model=10, heads=5, training=True).flops() == 3 * forward
    causal = 4 * (2 * 6 * 10 * 10) + 2 * (2 * 2 * (1 + 2 + 3) * 10)
    assert Setting(2, 3, "causal", d_model=10, heads=5).flops() == causal
    # One query for each of 2 sequences, and three keys.
    one = 4 * (2 * 2 * 10 * 10) + 2 * (2 * 2 * 3 * 10)
    assert Setting(2, 3, decoding=True, d_model=10, heads=5).flops() == one


def test_bytes_agree_with_a_count_by_hand() -> None:
    weights = 4 * (10 * 10 + 10)
    setting = Setting(2, 3, d_model=10, heads=5)
    assert setting.bytes() == 4 * (weights + 2 * 60)
    half = Setting(2, 3, d_model=10, heads=5, dtype=torch.bfloat16)
    assert half.bytes() == 2 * (weights + 2 * 60)
    cached = Setting(2, 3, decoding=True, d_model=10, heads=5)
    assert cached.bytes() == 4 * (weights + 2 * 20 + 2 * 60)
    training = Setting(2, 3, d_model=10, heads=5, training=True)
    assert training.bytes() == 3 * setting.bytes()


def test_a_batch_of_one_is_padded_too() -> None:
    assert Setting(1, 8, "padding").lengths().tolist() == [6]
    assert Setting(5, 8, "padding").lengths().tolist() == [4, 5, 6, 7, 8]


def test_tensors_and_weights_are_the_same_on_every_device(device: torch.device) -> None:
    setting = Setting(2, 3, d_model=10, heads=5, device=device)
    on_cpu = Setting(2, 3, d_model=10, heads=5)
    assert setting.x().cpu().equal(on_cpu.x())
    assert setting.grad_output().cpu().equal(on_cpu.grad_output())
    assert not setting.x().equal(setting.grad_output())
    for one, other in zip(
        setting.core().parameters(), on_cpu.core().parameters(), strict=True
    ):
        assert one.device.type == device.type
        assert one.cpu().equal(other)
        assert one.abs().max() > 0  # biases too


def test_an_unknown_mask_is_refused() -> None:
    message = "`mask` (='sideways') must be one of none, causal, padding"
    with pytest.raises(ValueError, match=re.escape(message)):
        Setting(2, 3, "sideways")


def test_a_setting_is_described_in_a_few_words() -> None:
    assert str(Setting(4, 1024)) == "batch 4, length 1,024, no mask"
    training = Setting(4, 10, "causal", 0.1, training=True)
    assert str(training) == "batch 4, length 10, causal, dropout 0.1"
    assert str(Setting(8, 4096, decoding=True)) == "batch 8, 4,096 keys in the cache"


def test_settings_survive_json() -> None:
    setting = Setting(2, 3, "padding", 0.1, True, dtype=torch.bfloat16)
    fields = json.loads(json.dumps(setting.as_dict()))
    assert Setting.from_dict(fields) == setting
