"""HunyuanVideo-1.5 checkpoints with random weights in diffusers' layout, and diffusers' own run of them.

    python -m tests.support.hunyuan_layout DIR                                  # small: 9 latent pixels a side, 2 MB
    python -m tests.support.hunyuan_layout DIR --image                          # small, image-to-video
    python -m tests.support.hunyuan_layout DIR --full --component transformer  # the released shapes in bfloat16, 17 GB

Names, shapes and configs come from the reference classes. Needs the `test` extra.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from diffusers.guiders import ClassifierFreeGuidance

from tests.support.hunyuan_tokenizers import save_byt5_tokenizer, save_qwen_tokenizer
from tests.support.released_layout import randomise, write_module

TRANSFORMER: dict[str, Any] = {
    "in_channels": 9,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "text_embed_dim": 32,
    "text_embed_2_dim": 24,
    "image_embed_dim": 20,
    "rope_axes_dim": (8, 12, 12),
    "target_size": 80,
}
VAE: dict[str, Any] = {
    "latent_channels": 4,
    "block_out_channels": (8, 16, 16, 32, 32),
    "layers_per_block": 1,
}
QWEN: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
}
BYT5: dict[str, Any] = {
    "vocab_size": 384,
    "d_model": 24,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 2,
    "num_heads": 3,
    "feed_forward_proj": "gated-gelu",
    "is_encoder_decoder": False,
}
SIGLIP: dict[str, Any] = {
    "hidden_size": 20,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 42,
    "patch_size": 14,
}


FULL_QWEN: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128000,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}
FULL_BYT5 = BYT5 | {"vocab_size": 1510, "d_model": 1472, "d_kv": 64, "d_ff": 3584, "num_layers": 12, "num_heads": 6}
FULL_SIGLIP: dict[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
}


def build(component: str, *, small: bool, **changes: Any) -> Any:
    """The reference's module of one component; `changes` are config keys that differ. Weights: its own init."""
    if component == "transformer":
        return diffusers.HunyuanVideo15Transformer3DModel(**(TRANSFORMER if small else {}) | changes)
    if component == "vae":
        return diffusers.AutoencoderKLHunyuanVideo15(**(VAE if small else {}) | changes)
    if component == "text_encoder":
        config = transformers.Qwen2_5_VLTextConfig(**(QWEN if small else FULL_QWEN) | changes)
        return transformers.Qwen2_5_VLTextModel(config)
    if component == "text_encoder_2":
        return transformers.T5EncoderModel(transformers.T5Config(**(BYT5 if small else FULL_BYT5) | changes))
    return transformers.SiglipVisionModel(
        transformers.SiglipVisionConfig(**(SIGLIP if small else FULL_SIGLIP) | changes)
    )


def write_component(folder: Path, component: str, dtype: str, **changes: Any) -> int:
    """Write one component in the released shape, streamed. Returns its bytes.

    changes: config keys that differ from the release's.
    """
    with torch.device("meta"):
        module = build(component, small=False, **changes)
    return write_module(folder / component, module, dtype)


COMPONENTS = ("text_encoder", "text_encoder_2", "transformer", "vae")
IMAGE_ENCODER = "image_encoder"


def save_layout(folder: Path, *, image: bool = False, guidance_scale: float = 6.0, **transformer: Any) -> Path:
    """Write a checkpoint. image: of image-to-video; transformer: changes of its config."""
    vocabulary = save_qwen_tokenizer(folder / "tokenizer")
    save_byt5_tokenizer(folder / "tokenizer_2")
    changes: dict[str, Any] = {"text_encoder": {"vocab_size": vocabulary}, "transformer": transformer}
    names = (*COMPONENTS, IMAGE_ENCODER) if image else COMPONENTS
    modules = {
        name: randomise(build(name, small=True, **changes.get(name, {})), seed) for seed, name in enumerate(names)
    }
    kind: Any = diffusers.HunyuanVideo15ImageToVideoPipeline if image else diffusers.HunyuanVideo15Pipeline
    more = {}
    if image:
        size = {"height": SIGLIP["image_size"], "width": SIGLIP["image_size"]}
        more = {"feature_extractor": transformers.SiglipImageProcessor(size=size)}
    pipe = kind(
        **modules,
        **more,
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder / "tokenizer"),
        tokenizer_2=transformers.ByT5Tokenizer.from_pretrained(folder / "tokenizer_2"),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        guider=ClassifierFreeGuidance(guidance_scale=guidance_scale),
    )
    pipe.save_pretrained(folder)
    return folder


def run_reference(
    folder: Path,
    prompts: list[str],
    negative: list[str],
    latents: np.ndarray,
    *,
    guidance_scale: float | None = None,
    **options: Any,
) -> Any:
    """diffusers' frames [B, F, H, W, 3] in [0, 1].

    latents: [B, T, h, w, C]. guidance_scale: default: the checkpoint's.
    """
    image = "image" in options
    kind = diffusers.HunyuanVideo15ImageToVideoPipeline if image else diffusers.HunyuanVideo15Pipeline
    pipe = kind.from_pretrained(folder)
    if guidance_scale is not None:
        pipe.guider = pipe.guider.new(guidance_scale=guidance_scale)
    pipe.vae.enable_slicing()  # without it, diffusers decodes one video only
    pipe.set_progress_bar_config(disable=True)
    with torch.no_grad():
        return pipe(
            prompt=prompts,
            negative_prompt=negative,
            latents=torch.tensor(latents).permute(0, 4, 1, 2, 3),
            output_type="np",
            **options,
        ).frames


def main() -> None:
    """Parse and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path, help="a directory that does not exist yet")
    parser.add_argument("--image", action="store_true", help="image-to-video")
    parser.add_argument("--full", action="store_true", help="the released shapes, in bfloat16")
    parser.add_argument("--component", nargs="+", choices=(*COMPONENTS, IMAGE_ENCODER), default=COMPONENTS)
    args = parser.parse_args()
    args.dir.mkdir(parents=True)
    if args.full:
        for name in args.component:
            write_component(args.dir, name, "bfloat16")
    else:
        save_layout(args.dir, image=args.image)
    print(args.dir)


if __name__ == "__main__":
    main()
