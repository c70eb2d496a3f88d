"""Configs that are made from what the code reads of them."""

import inspect
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from attention_laws.configs import config_source


@dataclass
class Spec:
    MULTI_HEAD: int = 8


class OfSpec(nn.Module):
    def __init__(self, __spec: Spec) -> None:
        super().__init__()
        self.heads = __spec.MULTI_HEAD


def test_a_config_may_have_any_name_if_its_class_is_annotated() -> None:
    (parameter,) = inspect.signature(OfSpec).parameters.values()
    assert parameter.name == "_OfSpec__spec"
    source, scope = config_source(OfSpec, parameter) or ("", {})
    assert (source, scope) == ("Spec(MULTI_HEAD={heads})", {"Spec": Spec})


OF_DEFAULT = SimpleNamespace(n_embd=48, query_chunk=64, rope_scaling=None, gain=1.5)


class OfDefault(nn.Module):
    def __init__(self, config: Any = OF_DEFAULT) -> None:
        super().__init__()
        self.width, self.chunk = config.n_embd, config.query_chunk
        self.scaling, self.gain = config.rope_scaling, config.gain


def test_the_fields_of_a_default_config_that_are_no_sizes_keep_their_values() -> None:
    (parameter,) = inspect.signature(OfDefault).parameters.values()
    source, _ = config_source(OfDefault, parameter) or ("", {})
    fields = "n_embd={d_model}, query_chunk=64, rope_scaling=None, gain=1.5"
    assert source == f"SimpleNamespace({fields})"


@dataclass
class OfPartsConfig:
    encoder: dict[str, int]


@dataclass
class OfPartsEncoderConfig:
    hidden_size: int
    num_heads: int = 8
    num_kv_heads: tuple[int, ...] = (1, 2, 4)  # of three stages


class OfPartsAttention(nn.Module):
    def __init__(self, config: OfPartsConfig) -> None:
        super().__init__()
        width, self.heads = config.hidden_size, config.num_heads  # type: ignore[attr-defined]
        self.query = nn.Linear(width, width)
        self.scale = getattr(config, "scale", 1.0)


class OfPartsBlock(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)


@pytest.mark.parametrize(
    ("attention", "sizes"),
    [
        (OfPartsAttention, "hidden_size={d_model}, num_heads={heads}"),
        (OfPartsBlock, "hidden_size={d_model}, num_heads={heads}"),
    ],
)
def test_of_several_configs_the_one_with_the_fields_that_are_read_is_built(
    attention: type[nn.Module], sizes: str
) -> None:
    parameter = inspect.signature(attention).parameters["config"]
    source, scope = config_source(attention, parameter) or ("", {})
    assert source == f"OfPartsEncoderConfig({sizes})"
    assert scope == {"OfPartsEncoderConfig": OfPartsEncoderConfig}


class ReadsSizes(nn.Module):
    def __init__(self, cfg: Any) -> None:
        super().__init__()
        width = cfg.width * 2 if cfg.is_deep else cfg.width
        self.layer = nn.Linear(width, getattr(cfg, "d_out", width))


class PassesOn(nn.Module):
    def __init__(self, args: Any) -> None:
        super().__init__()
        self.attention = ReadsSizes(args)
        self.last = nn.Linear(args.width, args.width)


def test_the_fields_of_a_config_are_also_those_that_its_parts_read() -> None:
    (parameter,) = inspect.signature(PassesOn).parameters.values()
    source, _ = config_source(PassesOn, parameter) or ("", {})
    assert source.startswith("SimpleNamespace(width={d_model}, ")
    assert "is_deep=False" in source


@pytest.mark.parametrize(
    ("name", "built"),
    [
        ("glmasr.modeling_glmasr:GlmAsrAttention", "GlmAsrEncoderConfig(hidden_size="),
        ("gpt_neox.modeling_gpt_neox:GPTNeoXAttention", "GPTNeoXConfig(hidden_size="),
        ("musicgen.modeling_musicgen:MusicgenAttention", "MusicgenConfig(attn_"),
    ],
)
def test_an_imported_config_is_found_by_the_name_of_its_model(
    name: str, built: str
) -> None:
    file, _, name = name.partition(":")
    module = pytest.importorskip(f"transformers.models.{file}")
    attention = getattr(module, name)
    parameter = inspect.signature(attention).parameters["config"]
    source, scope = config_source(attention, parameter) or ("", {})
    assert source.startswith(built)
    assert [*scope] == [built.partition("(")[0]]


class OfFields(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.query = nn.Linear(config.n_embd, config.n_embd)
        self.heads, self.dropout = config.n_head, config.attn_pdrop


class Inherits(OfFields):
    """What reads the fields is its base."""


def test_the_fields_that_a_base_reads_are_given() -> None:
    (parameter,) = inspect.signature(Inherits).parameters.values()
    source, _scope = config_source(Inherits, parameter) or ("", {})
    assert "n_embd={d_model}, n_head={heads}, attn_pdrop=0.1" in source
