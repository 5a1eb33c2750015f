"""The reference models in small: random weights, written in the released layout, taken through the real converter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import sentencepiece
import torch
import transformers

from conversion.convert import convert

SHARED = Path(__file__).resolve().parents[2] / "shared"
"""Real data that is not part of the project; tests that want it skip where it is missing."""

SMALL = {
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "num_layers": 2,
    "text_embed_dim": 40,
    "time_embed_dim": 24,
    "max_text_seq_length": 10,
    "sample_height": 8,
    "sample_width": 12,
    "sample_frames": 9,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "cogvideox-2b": {},
    "cogvideox-5b": {"use_rotary_positional_embeddings": True},
    "cogvideox-5b-i2v": {
        "use_rotary_positional_embeddings": True,
        "use_learned_positional_embeddings": True,
        "in_channels": 32,
    },
    "cogvideox1.5-5b": {"use_rotary_positional_embeddings": True, "patch_size_t": 2, "patch_bias": False},
    "cogvideox1.5-5b-i2v": {
        "use_rotary_positional_embeddings": True,
        "patch_size_t": 2,
        "patch_bias": False,
        "in_channels": 32,
        "ofs_embed_dim": 24,
    },
}
"""release -> what sets its architecture apart, in diffusers' config keys."""


def randomise(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Every parameter and stored buffer random: no zero gate, unit scale or empty bias that could hide a fault."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in module.state_dict().items():
            noise = torch.randn(value.shape, generator=generator)
            if value.ndim > 1:
                noise *= 0.1 if "pos_embedding" in name else value[0].numel() ** -0.5
            elif name.endswith("weight"):
                noise = 1 + 0.2 * noise
            else:
                noise *= 0.2
            value.copy_(noise.to(value.dtype))
    return module.eval().requires_grad_(False)


def make_transformer(release: str, seed: int = 0, **changes: Any) -> diffusers.CogVideoXTransformer3DModel:
    """A transformer with the release's architecture, small unless `changes` say otherwise."""
    config = SMALL | ARCHITECTURES[release] | changes
    return randomise(diffusers.CogVideoXTransformer3DModel(**config), seed)


def make_vae(seed: int = 0, **changes: Any) -> diffusers.AutoencoderKLCogVideoX:
    """A video autoencoder, small unless `changes` say otherwise."""
    config: dict[str, Any] = {
        "block_out_channels": (8, 16, 16, 32),
        "down_block_types": ("CogVideoXDownBlock3D",) * 4,
        "up_block_types": ("CogVideoXUpBlock3D",) * 4,
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "sample_height": 64,
        "sample_width": 96,
    } | changes
    return randomise(diffusers.AutoencoderKLCogVideoX(**config), seed)


def make_text_encoder(seed: int = 0, **changes: Any) -> transformers.T5EncoderModel:
    """A T5 v1.1 encoder, small unless `changes` say otherwise."""
    config: dict[str, Any] = {
        "vocab_size": 32128,
        "d_model": 40,
        "d_kv": 8,
        "d_ff": 64,
        "num_heads": 4,
        "num_layers": 2,
        "feed_forward_proj": "gated-gelu",
        "dropout_rate": 0.0,
    } | changes
    return randomise(transformers.T5EncoderModel(transformers.T5Config(**config)), seed)


def convert_component(
    component: str, module: Any, folder: Path, *, dtype: str | None = None, max_shard_size: str = "10GB"
) -> Path:
    """Save a reference module in the released layout below `folder`, convert it, return the native directory."""
    module.save_pretrained(folder / "hf" / component, max_shard_size=max_shard_size)
    native = folder / "native"
    convert(folder / "hf", native, components=[component], dtype=dtype)
    return native


def make_spiece(path: Path) -> Path:
    """A small SentencePiece model with T5's special ids, trained here."""
    words = ["a", "small", "large", "red", "blue", "circle", "square", "moves", "to", "the", "left", "on", "white"]
    random = np.random.default_rng(0)
    lines = [" ".join(random.choice(words, 8)) for _ in range(200)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(path.with_suffix("")),
        vocab_size=60,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    return path


def make_scheduler(kind: str, snr_shift_scale: float) -> Any:
    """The reference's sampler with the released settings."""
    return {"ddim": diffusers.CogVideoXDDIMScheduler, "dpm": diffusers.CogVideoXDPMScheduler}[kind](
        snr_shift_scale=snr_shift_scale,
        timestep_spacing="trailing",
        rescale_betas_zero_snr=True,
        prediction_type="v_prediction",
        clip_sample=False,
    )


def save_layout(folder: Path, release: str, *, transformer: Any = None) -> Path:
    """A whole small checkpoint in the released layout."""
    (transformer or make_transformer(release)).save_pretrained(folder / "transformer")
    scale = 1.15258426 if "2b" in release else 0.7
    make_vae(scaling_factor=scale).save_pretrained(folder / "vae")
    make_text_encoder().save_pretrained(folder / "text_encoder")
    make_scheduler("ddim", 3.0 if "2b" in release else 1.0).save_pretrained(folder / "scheduler")
    (folder / "tokenizer").mkdir()
    make_spiece(folder / "tokenizer" / "spiece.model")
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "CogVideoXPipeline"}))
    return folder


def relative_error(ours: Any, reference: Any) -> float:
    """Largest difference, in units of the reference's standard deviation."""
    ours, reference = (np.asarray(x, np.float64) for x in (ours, reference))
    assert ours.shape == reference.shape, f"shape {ours.shape}, reference {reference.shape}"
    return float(np.abs(ours - reference).max() / reference.std())


def rms_error(ours: Any, reference: Any) -> float:
    """Root mean square difference, in units of the reference's standard deviation."""
    ours, reference = (np.asarray(x, np.float64) for x in (ours, reference))
    assert ours.shape == reference.shape, f"shape {ours.shape}, reference {reference.shape}"
    return float(np.sqrt(np.square(ours - reference).mean()) / reference.std())
