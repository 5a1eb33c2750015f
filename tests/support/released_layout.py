"""Checkpoints with random weights in the Hugging Face layout: small ones to try things, full ones to measure.

    python -m tests.support.released_layout DIR --release cogvideox-2b           # small: 64x96 pixels, 9 frames, 8 MB
    python -m tests.support.released_layout DIR --release cogvideox-2b --full    # the released shapes, 14 GB

Names, shapes and configs come from the reference classes, so nothing here repeats them. Needs the `test` extra.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import sentencepiece
import torch
import transformers
from diffusers.schedulers import CogVideoXDDIMScheduler, CogVideoXDPMScheduler

from cogvideox_flax.conversion.write import FLOATS
from cogvideox_flax.io.tensor_file import TensorWriter
from cogvideox_flax.models.registry import RELEASES

SHARD_BYTES = 5_000_000_000  # as the released checkpoints are cut

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
        "ofs_embed_dim": 512,
    },
}
"""release -> the config of its transformer where it differs from diffusers' defaults."""

_SIZE_5B = {"num_layers": 42, "num_attention_heads": 48}
_SIZE_1_5 = _SIZE_5B | {"sample_height": 96, "sample_width": 170, "sample_frames": 81}
SMALL_TRANSFORMER = {
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "num_layers": 2,
    "text_embed_dim": 40,
    "time_embed_dim": 24,
    "max_text_seq_length": 10,
    "sample_height": 4,
    "sample_width": 6,
    "sample_frames": 9,
}
VAE = {
    "block_out_channels": (128, 256, 256, 512),
    "layers_per_block": 3,
    "down_block_types": ("CogVideoXDownBlock3D",) * 4,
    "up_block_types": ("CogVideoXUpBlock3D",) * 4,
}
SMALL_VAE = {
    "block_out_channels": (8, 16, 16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "sample_height": 64,
    "sample_width": 96,
}
T5_XXL: dict[str, Any] = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
    "dropout_rate": 0.0,
}
SMALL_T5 = {"d_model": 40, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 2}


def build(component: str, release: str, *, small: bool, **changes: Any) -> Any:
    """The reference's module for one component; `changes` are config keys that differ. Weights: its own init."""
    if component == "transformer":
        size = _SIZE_1_5 if "1.5" in release else {} if "2b" in release else _SIZE_5B
        config = size | ARCHITECTURES[release]
        if small:
            config |= SMALL_TRANSFORMER
            if "ofs_embed_dim" in config:  # it is added to the time embedding, so as wide
                config["ofs_embed_dim"] = SMALL_TRANSFORMER["time_embed_dim"]
        return diffusers.CogVideoXTransformer3DModel(**config | changes)
    if component == "text_encoder":
        return transformers.T5EncoderModel(transformers.T5Config(**T5_XXL | (SMALL_T5 if small else {}) | changes))
    released = RELEASES[release].configs["vae"]
    scale = {name: getattr(released, name) for name in ("scaling_factor", "invert_scale_latents")}
    return diffusers.AutoencoderKLCogVideoX(**VAE | scale | (SMALL_VAE if small else {}) | changes)


def random_weight(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Float32 weights that keep activations near unit size, with no zero gate, unit scale or empty bias."""
    x = random.standard_normal(shape, np.float32)
    if "pos_embedding" in name:
        return np.float32(0.1) * x
    if len(shape) > 1:
        return x * np.float32(int(np.prod(shape[1:])) ** -0.5)
    return np.float32(1) + np.float32(0.2) * x if name.endswith("weight") else np.float32(0.2) * x


def randomise(module: Any, seed: int = 0) -> Any:
    """Give every parameter and stored buffer a random value; ready for inference."""
    random = np.random.default_rng(seed)
    with torch.no_grad():
        for name, value in module.state_dict().items():
            value.copy_(torch.from_numpy(random_weight(random, name, tuple(value.shape))))
    return module.eval().requires_grad_(False)


def make_scheduler(kind: str, snr_shift_scale: float) -> Any:
    """The reference's scheduler, "ddim" or "dpm", with the released settings."""
    return {"ddim": CogVideoXDDIMScheduler, "dpm": CogVideoXDPMScheduler}[kind](
        snr_shift_scale=snr_shift_scale,
        timestep_spacing="trailing",
        rescale_betas_zero_snr=True,
        prediction_type="v_prediction",
        clip_sample=False,
    )


def make_spiece(path: Path) -> Path:
    """A small SentencePiece model with T5's special ids, trained here; always the same bytes."""
    words = ["a", "small", "large", "red", "blue", "circle", "square", "moves", "to", "the", "left", "on", "white"]
    random = np.random.default_rng(0)
    lines = [" ".join(random.choice(words, 8)) for _ in range(200)]
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=written,
        vocab_size=60,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    path.write_bytes(written.getvalue())
    return path


def save_layout(
    folder: Path,
    release: str,
    *,
    transformer: Any = None,
    vae: Any = None,
    text_encoder: Any = None,
    text_length: int = 10,
    spiece: Path | None = None,
) -> Path:
    """A whole small checkpoint; its modules may be given, the rest is random."""
    transformer = transformer or randomise(build("transformer", release, small=True, max_text_seq_length=text_length))
    transformer.save_pretrained(folder / "transformer")
    (vae or randomise(build("vae", release, small=True))).save_pretrained(folder / "vae")
    (text_encoder or randomise(build("text_encoder", release, small=True))).save_pretrained(folder / "text_encoder")
    save_rest(folder, release, spiece)
    return folder


def write_component(folder: Path, component: str, release: str, dtype: str, seed: int = 0, **changes: Any) -> int:
    """Write one component in the released shape. Returns its bytes.

    changes: config keys that differ from the release's.
    """
    with torch.device("meta"):
        module: Any = build(component, release, small=False, **changes)
    return write_module(folder / component, module, dtype, seed)


def write_module(folder: Path, module: Any, dtype: str, seed: int = 0) -> int:
    """Write random weights for a module on the meta device, streamed. Returns bytes; peak memory is about one tensor.

    module: of diffusers or transformers, each of which has its own names of files.
    """
    shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    shapes.pop("encoder.embed_tokens.weight", None)  # tied to shared.weight, and not saved by the reference either
    folder.mkdir(parents=True)
    of_transformers = isinstance(module, transformers.PreTrainedModel)
    if of_transformers:
        module.config.architectures = [type(module).__name__]
        module.config.save_pretrained(folder)
    else:
        module.save_config(folder)

    kind = FLOATS[dtype]
    shards = list(_shards(shapes, kind.itemsize))
    stem = "model" if of_transformers else "diffusion_pytorch_model"
    random = np.random.default_rng(seed)
    where = {}
    for i, names in enumerate(shards):
        suffix = "" if len(shards) == 1 else f"-{i + 1:05d}-of-{len(shards):05d}"
        path = folder / f"{stem}{suffix}.safetensors"
        with TensorWriter(path, {name: (shapes[name], kind) for name in names}, {"format": "pt"}) as writer:
            for name in names:
                x = random_weight(random, name, shapes[name])
                if name.endswith("SelfAttention.q.weight"):
                    # T5 does not divide scores by the root of the head size: without this, attention chooses single
                    # tokens, and what bfloat16 rounds grows with every layer
                    x *= np.float32(module.config.d_kv**-0.5)
                writer.write(name, x.astype(kind))
                where[name] = path.name
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(path.stat().st_size for path in folder.iterdir())}, "weight_map": where}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    return sum(path.stat().st_size for path in folder.iterdir())


def save_rest(folder: Path, release: str, spiece: Path | None = None) -> None:
    """The files of a checkpoint besides its weights: scheduler config, tokenizer, model_index.json."""
    make_scheduler("ddim", RELEASES[release].configs["scheduler"].snr_shift_scale).save_pretrained(folder / "scheduler")
    (folder / "tokenizer").mkdir()
    target = folder / "tokenizer" / "spiece.model"
    shutil.copyfile(spiece, target) if spiece is not None else make_spiece(target)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "CogVideoXPipeline"}))


def _shards(shapes: dict[str, tuple[int, ...]], itemsize: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        nbytes = int(np.prod(shape)) * itemsize
        if names and size + nbytes > SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += nbytes
    yield names


def main() -> None:
    """Parse and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path, help="a directory that does not exist yet")
    parser.add_argument("--release", choices=ARCHITECTURES, default="cogvideox-2b")
    parser.add_argument("--spiece", type=Path, help="T5's own spiece.model; default: a tiny one, trained on the spot")
    parser.add_argument("--full", action="store_true", help="the released shapes, in half precision")
    args = parser.parse_args()
    args.dir.mkdir(parents=True)
    if args.full:
        half = RELEASES[args.release].dtype
        for component, dtype in (("transformer", half), ("vae", "float32"), ("text_encoder", half)):
            write_component(args.dir, component, args.release, dtype)
        save_rest(args.dir, args.release, args.spiece)
    else:
        text_length = RELEASES[args.release].configs["tokenizer"].max_length
        save_layout(args.dir, args.release, text_length=text_length, spiece=args.spiece)
    print(args.dir)


if __name__ == "__main__":
    main()
