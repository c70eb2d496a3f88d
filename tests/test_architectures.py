"""With the same weights, our layers compute what those of `transformers` compute."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
    x, memory = x.transpose(0, 1), memory.transpose(0, 1)
    is_causal = getattr(layer, "is_causal", False)
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
    if name.startswith("T5"):
        models.require("5.16")
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


def quantized() -> Any:
    layer = llama()
    layer.k_proj = type("Linear4bit", (nn.Linear,), {})(24, 8)
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
            "`k_proj` of `module` is a Linear4bit, not a linear layer; load the model "
            "without quantization",
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
    if layer is later_layer_of_t5:
        models.require("5.16")
    module = layer()
    with pytest.raises(error, match=message):
        convert.from_transformers(module)


def test_rotary_settings_are_read_as_each_release_stores_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = {"rope_theta": 100.0, "partial_rotary_factor": 0.5}
    old |= {"rope_scaling": {"type": "linear", "factor": 2.0}}
    old |= {"rope_local_base_freq": 7.0, "max_position_embeddings": 64}
    # Transformers 4 keeps this entry of a newer file, and does not read it.
    new = {"rope_parameters": {"rope_theta": 9.0}}
    config = SimpleNamespace(**old, **new)
    layer = SimpleNamespace(config=config, is_sliding=False)
    bases = []
    for release, is_sliding in (("4.57.6", False), ("4.57.6", True), ("5.5.0", False)):
        monkeypatch.setattr(architectures, "version", lambda name, seen=release: seen)
        layer.is_sliding = is_sliding
        found = architectures.rotary_of(layer, "halves", width=8).frequencies
        bases.append([round(1 / number) for number in found])
    assert bases == [[2, 20], [1, 2, 3, 4], [1, 2, 3, 5]]


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
        message = rf"Converting T5 needs transformers>=5\.16, but {seen} is installed"
        with pytest.raises(ImportError, match=message):
            convert.from_transformers(later_layer_of_t5())
