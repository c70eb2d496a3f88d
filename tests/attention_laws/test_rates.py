"""The dropout probabilities of a module."""

import copy
from dataclasses import dataclass

import torch
from torch import nn

from attention_laws.rates import dropout_places, set_dropout


def test_every_dropout_is_set_in_layers_and_attributes() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Dropout1d(0.1)
            self.attn_drop = 0.2
            self.p = 0.3  # of something else
            self.dropped_layers = 3
            self.dropout = None

    part = Part()
    assert set_dropout(part, 0.5)
    assert (part.layer.p, part.attn_drop) == (0.5, 0.5)
    assert (part.p, part.dropped_layers, part.dropout) == (0.3, 3, None)
    assert not set_dropout(part, 0.5)

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p_attn = 0.3

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (torch.rand_like(x) > self.p_attn)

    assert dropout_places(Noisy()) == [""]


@dataclass
class Config:
    attention_drop: float = 0.1
    embedding_drop: float = 0.2


@dataclass(frozen=True)
class FrozenConfig:
    attention_drop: float = 0.1


@dataclass(slots=True)
class ConfigOfSlots:
    attention_drop: float = 0.1


class ReadsConfig(nn.Module):
    def __init__(self, config: Config | FrozenConfig | ConfigOfSlots) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, self.config.attention_drop, self.training)


def test_a_probability_that_each_call_reads_from_a_config_is_set_there() -> None:
    module = nn.Sequential(ReadsConfig(Config()), nn.Linear(2, 2))
    assert dropout_places(module) == ["*.attention_drop"]
    changed = copy.deepcopy(module)
    assert set_dropout(changed, 0.5)
    configs = [each[0].config for each in (changed, module)]
    assert configs == [Config(0.5, 0.2), Config()]


def test_a_config_that_others_may_share_stays_as_it_is() -> None:
    for config in (Config(), FrozenConfig(), ConfigOfSlots()):
        module = ReadsConfig(config)
        assert set_dropout(module, 0.5)
        assert (module.config.attention_drop, config.attention_drop) == (0.5, 0.1)
