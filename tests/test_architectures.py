"""With the same weights, our layers compute what those of `transformers` compute."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import models
from headnotes import architectures, checks, convert
from headnotes.integrations import transformers

pytest.importorskip("transformers")

LENGTH, BATCH = 11, 2


def record(model: Any, layers: dict[str, Any], ids: Tensor) -> dict[str, Any]:
    """The inputs and the output of each attention layer in a forward pass."""
    seen: dict[str, Any] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            x = args[0] if args else kwargs["hidden_states"]
            memory = kwargs.get("key_value_states")
            seen[name] = (x, x if memory is None else memory, output[0])

        return hook

    for name in layers:
        layer = model.get_submodule(name)
        layer.register_forward_hook(keep(name), with_kwargs=True)
    decoder = {"decoder_input_ids": ids[:, :7]} if hasattr(model, "encoder") else {}
    model(input_ids=ids, **decoder)
    return seen


def attend(ours: Any, layer: Any, x: Tensor, memory: Tensor) -> Tensor:
    """Our output for inputs of theirs, batch first; causal where theirs is."""
    # Before Transformers 5.15, a layer of T5 does not know.
    of_decoder = x is memory and getattr(layer, "is_decoder", False)
    is_causal = getattr(layer, "is_causal", of_decoder)
    x, memory = x.transpose(0, 1), memory.transpose(0, 1)
    inputs = {"query": x, "key": memory, "value": memory}
    if hasattr(ours, "latent"):
        causal = torch.ones(LENGTH, LENGTH).bool().tril().unsqueeze(-1)
        y = ours(**inputs, mask=causal)
    else:
        y = ours(**inputs, is_causal=is_causal)
    return y.transpose(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", models.MODELS)
@torch.no_grad()
def test_a_converted_layer_gives_the_same_output_and_converts_back_bit_for_bit(
    name: str,
) -> None:
    model = models.build(name)
    layers = convert.from_transformers(model)
    (kind,) = {type(model.get_submodule(place)).__name__ for place in layers}
    assert name.startswith(kind.removesuffix("Attention"))
    ids = torch.randint(1, 31, (BATCH, LENGTH))
    seen = record(model, layers, ids)
    for place, ours in layers.items():
        layer = model.get_submodule(place)
        x, memory, expected = seen[place]
        output = attend(ours, layer, x, memory)
        if name.startswith("Bert"):
            output = layer.output.LayerNorm(output + x)
        assert expected.isfinite().all()
        assert (output - expected).norm() <= 1e-5 * expected.norm(), place
    state = convert.to_transformers(layers, model)
    own = model.state_dict()
    assert all(torch.equal(own[key], value) for key, value in state.items())
    # All parameters of the layers are there.
    assert set(state) == {
        k for k in own if k.startswith(tuple(f"{n}." for n in layers))
    }


def llama(**settings: Any) -> Any:
    from transformers.models.llama import modeling_llama

    sizes = {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2}
    config = models.configuration(modeling_llama.LlamaConfig, sizes | settings)
    return modeling_llama.LlamaAttention(config, layer_idx=0)


def test_every_architecture_is_tested() -> None:
    for kind in architectures.ARCHITECTURES:
        prefix = kind.removesuffix("Attention")
        assert any(name.startswith(prefix) for name in models.MODELS), kind


def test_the_new_layer_has_the_dtype_and_mode_of_the_old_and_memory_of_its_own() -> (
    None
):
    layer = llama(attention_dropout=0.3).to(torch.bfloat16).train()
    before = torch.get_rng_state()
    ours = convert.from_transformers(layer)
    assert torch.equal(torch.get_rng_state(), before)
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    assert all(module.training for module in ours.modules())
    assert ours.dropout.p == 0.3
    assert ours.rotary.frequencies[0] == 1.0
    old = layer.q_proj.weight.clone()
    nn.init.zeros_(ours.query.linear.weight)
    assert torch.equal(layer.q_proj.weight, old)
    state = convert.to_transformers(ours, layer)
    assert torch.equal(layer.q_proj.weight, old)
    layer.load_state_dict(state)
    assert not layer.q_proj.weight.any()


def test_what_a_layer_of_theirs_cannot_hold_is_refused() -> None:
    layer = llama()
    ours = convert.from_transformers(layer)
    with torch.no_grad():
        ours.output.bias[3] = 0.5
    with pytest.raises(ValueError, match=r"lose `output.bias`.* largest entry is 0\.5"):
        convert.to_transformers(ours, layer)
    other = convert.from_transformers(llama(head_dim=8))
    with pytest.raises(ValueError, match="convert back to the layer that it was"):
        convert.to_transformers(other, layer)
    biased = llama(attention_bias=True)
    ours = convert.from_transformers(layer)
    with pytest.raises(ValueError, match=r"`module` has `key\.linear\.bias`, and"):
        convert.to_transformers(ours, biased)
    with pytest.raises(TypeError, match=r"`module` is a torch.nn.*Linear, not a layer"):
        convert.to_transformers(ours, nn.Linear(2, 2))


def layer_of(name: str) -> Any:
    model = models.build(name)
    return next(m for m in model.modules() if type(m).__name__.endswith("Attention"))


@pytest.mark.parametrize(
    ("source", "target", "settings", "message"),
    [
        (
            "LlamaForCausalLM",
            "CohereForCausalLM",
            {"use_qk_norm": False},
            "the rotary pairing of `ours` is 'halves', and of `module` 'neighbors'; co",
        ),
        (
            "Qwen3ForCausalLM",
            "Gemma3ForCausalLM",
            {},
            "the number added to the norm's weights of `ours` is 0, and of `module` 1;",
        ),
    ],
)
def test_a_layer_of_another_architecture_is_refused_if_its_numbers_mean_others(
    source: str,
    target: str,
    settings: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (source, target):
        sizes = {k: v for k, v in models.MODELS[name].items() if k != "attention_bias"}
        same = sizes | {"head_dim": 4} | settings
        monkeypatch.setitem(models.MODELS, name, same)
    ours = convert.from_transformers(layer_of(source))
    with pytest.raises(ValueError, match=message):
        convert.to_transformers(ours, layer_of(target))


def test_weights_that_are_computed_are_not_lost_on_the_way_back() -> None:
    layer = llama()
    ours = convert.from_transformers(layer)
    pruned = sparse()
    with torch.no_grad():
        pruned.v_proj(torch.zeros(1, 24))  # the weight is now a plain tensor
    with pytest.raises(TypeError, match=r"`v_proj.weight` .* `torch\.nn\.utils\.prune"):
        convert.to_transformers(ours, pruned)
    prune.remove(pruned.v_proj, "weight")
    pruned.load_state_dict(convert.to_transformers(ours, pruned))
    assert torch.equal(pruned.v_proj.weight, layer.v_proj.weight)


def quantized() -> Any:
    layer = llama()
    layer.k_proj = type("Linear4bit", (nn.Linear,), {})(24, 8)
    return layer


def without_parameters() -> Any:
    """As PyTorch's dynamic quantization makes it."""
    layer = llama()
    for name, _ in list(layer.named_children()):
        setattr(layer, name, nn.Identity())
    return layer


def adapted() -> Any:
    """A layer that an adapter has replaced, and which has neither weight nor bias."""
    layer = deepseek()
    layer.o_proj = nn.Sequential(layer.o_proj)
    return layer


def sparse() -> Any:
    """As `torch.nn.utils.prune` makes it."""
    layer = llama()
    prune.l1_unstructured(layer.v_proj, "weight", 0.5)
    return layer


def cross_attention() -> Any:
    from transformers.models.gpt2 import modeling_gpt2

    config = modeling_gpt2.GPT2Config(n_embd=24, n_head=6)
    return modeling_gpt2.GPT2Attention(config, is_cross_attention=True, layer_idx=0)


def pruned() -> Any:
    layer = llama()
    layer.pruned_heads = {1}  # an attribute of Transformers 4
    return layer


def relative_positions() -> Any:
    from transformers.models.bert import modeling_bert

    config = modeling_bert.BertConfig(hidden_size=24, num_attention_heads=6)
    config._attn_implementation = "eager"
    layer = modeling_bert.BertAttention(config)
    layer.self.position_embedding_type = "relative_key"
    return layer


def mixed() -> Any:
    layer = llama()
    layer.q_proj.half()
    return layer


def later_layer_of_t5() -> Any:
    from transformers.models.t5 import modeling_t5

    config = modeling_t5.T5Config(d_model=24, num_heads=6, d_kv=4)
    return modeling_t5.T5Attention(config, layer_idx=1)


def t5_with_odd_buckets() -> Any:
    from transformers.models.t5 import modeling_t5

    sizes = {"d_model": 24, "num_heads": 6, "d_kv": 4}
    config = modeling_t5.T5Config(**sizes, relative_attention_num_buckets=7)
    return modeling_t5.T5Attention(config, has_relative_attention_bias=True)


def deepseek(**settings: Any) -> Any:
    model = "DeepseekV3ForCausalLM"
    from transformers.models.deepseek_v3 import modeling_deepseek_v3

    kind = modeling_deepseek_v3.DeepseekV3Config
    config = models.configuration(kind, models.MODELS[model] | settings)
    return modeling_deepseek_v3.DeepseekV3Attention(config, layer_idx=0)


def both_sides() -> Any:
    from transformers.models.gemma3 import modeling_gemma3

    settings = models.MODELS["Gemma3ForCausalLM"] | {
        "use_bidirectional_attention": True
    }
    config = models.configuration(modeling_gemma3.Gemma3TextConfig, settings)
    return modeling_gemma3.Gemma3Attention(config, layer_idx=0)


ROPE = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
MSCALE = models.YARN | {"mscale": 0.5, "mscale_all_dim": 0.7}


@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        (
            lambda: nn.Sequential(nn.Linear(2, 2)),
            TypeError,
            "contains no attention layer of GPT-2, ",
        ),
        (
            quantized,
            TypeError,
            rf"`k_proj` of `module` is a {__name__}\.Linear4bit, not `nn\.Linear`; "
            "load the model without quantization",
        ),
        (
            without_parameters,
            TypeError,
            r"`q_proj` of `module` is a torch.*\.Identity, not `nn\.Linear`; load the",
        ),
        (adapted, TypeError, r"`o_proj` of `module` is a torch.*\.Sequential, not `nn"),
        (
            sparse,
            TypeError,
            r"`v_proj\.weight` of `module` is not a parameter, but computed from",
        ),
        (cross_attention, ValueError, r"cross-attention \(`is_cross_attention`\)"),
        (mixed, ValueError, "`module` mixes dtypes or devices"),
        (pruned, ValueError, "has pruned heads; load its weights into"),
        (
            relative_positions,
            ValueError,
            r"`position_embedding_type` \(='relative_key'\) of `module` adds a table",
        ),
        (later_layer_of_t5, ValueError, "convert the model, not the layer"),
        (t5_with_odd_buckets, ValueError, r"`buckets` \(=7\) must be even, as keys"),
        (both_sides, ValueError, "set `use_bidirectional_attention=False`"),
        (
            lambda: llama(rope_parameters=ROPE),
            ValueError,
            r"`rope_type` \(='dynamic'\) of `module` is unknown; there are 'default', ",
        ),
        (
            lambda: deepseek(rope_interleave=False),
            ValueError,
            "`rope_interleave=False`, but `LatentAttention` pairs neighbors",
        ),
        (
            lambda: deepseek(rope_parameters=MSCALE),
            ValueError,
            r"multiplies rotated components by 0\.9747, which `LatentAttention` cannot",
        ),
    ],
)
def test_what_our_modules_lack_is_refused_with_the_way_out(
    layer: Any, error: type[Exception], message: str
) -> None:
    module = layer()
    with pytest.raises(error, match=message):
        convert.from_transformers(module)


@pytest.mark.slow
def test_attention_of_another_architecture_is_left_out_with_a_warning() -> None:
    from transformers import Gemma3Config, Gemma3Model, Gemma3TextConfig

    settings = models.MODELS["Gemma3ForCausalLM"]
    text = models.configuration(Gemma3TextConfig, settings)
    vision = {"hidden_size": 12, "num_attention_heads": 2, "num_hidden_layers": 1}
    vision |= {"intermediate_size": 8, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(
        text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4
    )
    model = Gemma3Model(config)
    message = (
        r"^`module` has attention of other architectures, not converted: "
        r"SiglipAttention \(`vision_tower\.\S*encoder\.layers\.0\.self_attn`\)"
    )
    with pytest.warns(UserWarning, match=message):
        layers = convert.from_transformers(model)
    assert all(name.startswith("language_model.layers.") for name in layers)
    assert len(layers) == text.num_hidden_layers


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"]
)
@torch.no_grad()
def test_heads_are_rotated_in_part_only_if_the_layer_does_so(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.require("5.5")  # In Transformers 4, these layers raise an error.
    rope = {"rope_theta": 100.0, "partial_rotary_factor": 0.5}
    settings = models.MODELS[name] | {"num_hidden_layers": 1, "rope_parameters": rope}
    monkeypatch.setitem(models.MODELS, name, settings)
    model = models.build(name)
    layers = convert.from_transformers(model)
    seen = record(model, layers, torch.randint(1, 31, (BATCH, LENGTH)))
    [(place, ours)] = layers.items()
    x, memory, expected = seen[place]
    output = attend(ours, model.get_submodule(place), x, memory)
    assert (output - expected).norm() <= 1e-5 * expected.norm()


def test_without_a_factor_yarn_scales_by_the_lengths_of_the_context() -> None:
    models.require("5.5")
    from transformers.models.llama import modeling_llama

    rope = models.YARN | {"factor": None, "original_max_position_embeddings": 13}
    layer = llama(rope_parameters=rope, max_position_embeddings=91, head_dim=14)
    ours = convert.from_transformers(layer).rotary
    theirs = modeling_llama.LlamaRotaryEmbedding(layer.config)
    assert ours.attention_factor == pytest.approx(theirs.attention_scaling)
    assert ours.attention_factor == pytest.approx(0.1 * math.log(7) + 1)
    assert ours.frequencies == pytest.approx(theirs.inv_freq.tolist())


def test_rotary_settings_are_read_as_each_release_stores_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old: dict[str, Any] = {"rope_theta": 100.0}
    old |= {"rope_scaling": {"type": "linear", "factor": 2.0}}
    old |= {"rope_local_base_freq": 7.0, "max_position_embeddings": 64}
    # Transformers 4 keeps this entry of a newer file, and does not read it.
    new = {"rope_parameters": {"rope_theta": 25.0}}
    config = SimpleNamespace(**old, **new)
    layer = SimpleNamespace(config=config, is_sliding=False, rotary_ndims=4)
    bases = []
    for release, is_sliding in (("4.57.6", False), ("4.57.6", True), ("5.5.0", False)):
        monkeypatch.setattr(architectures, "version", lambda name, seen=release: seen)
        layer.is_sliding = is_sliding
        found = architectures.rotary_of(layer, "halves", width=8).frequencies
        bases.append([round(1 / number) for number in found])
    assert bases == [[2, 20], [1, 3], [1, 5]]


def test_layers_of_older_transformers_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seen in ("4.56.2", "5.4.0"):
        monkeypatch.setattr(checks, "version", lambda name, seen=seen: seen)
        message = f"needs transformers~=4.57 or transformers>=5.5, but {seen} is inst"
        with pytest.raises(ImportError, match=f"Converting Llama {message}"):
            convert.from_transformers(llama())
        with pytest.raises(ImportError, match=f"`register` {message}"):
            transformers.register()
    for seen in ("4.57.0", "5.10.0"):
        monkeypatch.setattr(checks, "version", lambda name, seen=seen: seen)
        convert.from_transformers(llama())


def test_a_layer_of_t5_is_known_by_its_name_where_it_does_not_know_itself() -> None:
    model = models.build("T5ForConditionalGeneration")
    expected = convert.from_transformers(model)
    for place in expected:
        # Transformers before 5.15 lacks these attributes.
        for attribute in ("config", "is_causal", "scaling"):
            vars(model.get_submodule(place)).pop(attribute, None)
    for place, ours in convert.from_transformers(model).items():
        assert ours.scale == expected[place].scale == 1
        assert (ours.score_bias is None) == place.endswith("EncDecAttention")
    with pytest.raises(ValueError, match="convert the model, not the layer"):
        convert.from_transformers(model.get_submodule(place))
