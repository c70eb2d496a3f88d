"""Check attention modules of installed packages with the laws of attention.

`python benchmarks/packages.py` writes the verdicts and the CPU time of each module to
`benchmarks/packages.json`; the page of the laws shows them. Packages that are
not installed are left out. Another file can be given as the argument.
"""

import datetime
import importlib
import json
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from attention_bench.report import commit, device_name, write
from attention_laws import check
from attention_laws.adapter import CallError

RESULTS = Path(__file__).with_suffix(".json")

# For each package, its modules: where they are, and the arguments with which an
# instance is built if the checker cannot infer them.
MODULES: dict[str, dict[str, dict[str, Any] | None]] = {
    "torch": {
        "torch.nn.MultiheadAttention": None,
        "torch.nn.TransformerEncoderLayer": None,
        "torch.nn.functional.scaled_dot_product_attention": None,
    },
    "diffusers": {
        "diffusers.models.attention_processor.Attention": None,
    },
    "fair-esm": {"esm.multihead_attention.MultiheadAttention": None},
    "labml-nn": {
        f"labml_nn.transformers.{path}": None
        for path in (
            "alibi.AlibiMultiHeadAttention",
            "mha.MultiHeadAttention",
            "primer_ez.MultiDConvHeadAttention",
            "retro.model.SelfAttention",
            "rope.RotaryPEMultiHeadAttention",
            "xl.relative_mha.RelativeMultiHeadAttention",
        )
    },
    "linear-attention-transformer": {
        "linear_attention_transformer.linear_attention_transformer.SelfAttention": None
    },
    "litgpt": {"litgpt.model.CausalSelfAttention": None},
    "local-attention": {"local_attention.LocalAttention": None},
    "open_clip_torch": {
        "open_clip.transformer.Attention": None,
        "open_clip.transformer.AttentionalPooler": None,
    },
    "openai-whisper": {"whisper.model.MultiHeadAttention": None},
    "perceiver-pytorch": {"perceiver_pytorch.perceiver_pytorch.Attention": None},
    "performer-pytorch": {"performer_pytorch.performer_pytorch.SelfAttention": None},
    "segment-anything": {
        "segment_anything.modeling.image_encoder.Attention": None,
        "segment_anything.modeling.transformer.Attention": None,
    },
    "timm": {
        "timm.layers.attention.Attention": None,
        "timm.layers.attention.AttentionRope": None,
        "timm.layers.attention2d.Attention2d": {"dim": 12, "num_heads": 3},
        "timm.layers.attention2d.MultiQueryAttentionV2": None,
        "timm.models.beit.Attention": None,
        "timm.models.maxxvit.Attention2d": None,
        "timm.models.maxxvit.AttentionCl": None,
        "timm.models.swin_transformer.WindowAttention": {
            "dim": 24,
            "num_heads": 3,
            "window_size": 3,
        },
    },
    "transformers": {
        f"transformers.models.{path}": None
        for path in (
            "bert.modeling_bert.BertSelfAttention",
            "distilbert.modeling_distilbert.DistilBertSelfAttention",
            "gemma2.modeling_gemma2.Gemma2Attention",
            "gpt2.modeling_gpt2.GPT2Attention",
            "llama.modeling_llama.LlamaAttention",
            "t5.modeling_t5.T5Attention",
            "vit.modeling_vit.ViTAttention",
            "whisper.modeling_whisper.WhisperAttention",
        )
    },
    "vit-pytorch": {
        "vit_pytorch.cait.Attention": None,
        "vit_pytorch.deepvit.Attention": None,
        "vit_pytorch.na_vit.Attention": None,
        "vit_pytorch.vit.Attention": None,
    },
    "x-transformers": {"x_transformers.x_transformers.Attention": None},
}


def check_module(path: str, arguments: dict[str, Any] | None) -> dict[str, Any]:
    """The number of laws that pass, those that fail, and the CPU time."""
    module, _, name = path.rpartition(".")
    attention = getattr(importlib.import_module(module), name)
    start = time.process_time()
    record: dict[str, Any] = {"module": path}
    try:
        report = check(attention if arguments is None else attention(**arguments))
    except CallError as error:
        record["error"] = str(error)
    else:
        record["passed"] = len(report.passed)
        record["failed"] = {r.law.name: r.detail for r in report.failed}
        record["skipped"] = len(report.not_applicable)
    return record | {"seconds": round(time.process_time() - start, 1)}


def main(path: Path) -> None:
    """Check each module, and write the record."""
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # loaded by the first compilation
    packages = []
    for package, modules in MODULES.items():
        try:
            installed = version(package)
        except PackageNotFoundError:
            continue
        checked = [check_module(*item) for item in modules.items()]
        packages.append({"name": package, "version": installed, "modules": checked})
        print(json.dumps(packages[-1], indent=2), flush=True)
    record = {
        "device": device_name(torch.device("cpu")),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "packages": packages,
    }
    write(path, json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS)
