"""Small models of both families on a device: this library's and the reference's, on the same weights and inputs; with
8-bit weights; and fine-tuning. A run of the embedded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

MODELS = (
    ("cogvideox", "text_encoder"),
    ("cogvideox", "transformer"),
    ("cogvideox", "encode"),
    ("cogvideox", "decode"),
    ("hunyuan", "text_encoder"),
    ("hunyuan", "text_encoder_2"),
    ("hunyuan", "image_encoder"),
    ("hunyuan", "transformer"),
    ("hunyuan", "encode"),
    ("hunyuan", "decode"),
)
"""Family and part."""

TIMESTEP = 987.0
GRID = 3, 8, 12
"""Latent frames, height and width."""

LENGTH = 10
Arrays = dict[str, np.ndarray]


def component_of(part: str) -> str:
    return "vae" if part in ("encode", "decode") else part


def inputs(family: str, part: str) -> Arrays:
    """Channels last; two of each, but one clip."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, np.float32)

    if part == "image_encoder":
        return {"images": normal(2, 42, 42, 3)}
    if part.startswith("text_encoder"):
        return {"ids": random.integers(2, 60, (2, LENGTH), np.int32)}
    if part == "encode":
        return {"video": random.uniform(-1, 1, (1, 9, 64, 96, 3)).astype(np.float32)}
    if part == "decode":
        return {"latents": normal(1, *GRID, 16 if family == "cogvideox" else 4)}
    if family == "cogvideox":
        return {"latents": normal(2, *GRID, 16), "context": normal(2, LENGTH, 40)}
    mask = (np.arange(LENGTH) < np.array([[LENGTH], [6]])).astype(np.float32)
    prompt = {"text": normal(2, LENGTH, 32), "text_mask": mask, "glyphs": normal(2, 7, 24), "image": normal(2, 5, 20)}
    return {"latents": normal(2, *GRID, 9), "glyph_mask": np.array([[1] * 4 + [0] * 3, [0] * 7], np.float32)} | prompt


def save(folder: Path) -> None:
    """Both families with random weights: FAMILY-hf in the released layout, FAMILY-native converted, FAMILY-KIND with
    8-bit weights."""
    from cogvideox_flax.checkpoint.quantize import quantize_checkpoint
    from cogvideox_flax.conversion.convert import convert
    from cogvideox_flax.nn.quantized import KINDS
    from tests.support import hunyuan_layout, released_layout

    released_layout.save_layout(folder / "cogvideox-hf", "cogvideox-5b")
    hunyuan_layout.save_layout(folder / "hunyuan-hf", image=True)
    for family in ("cogvideox", "hunyuan"):
        native = folder / f"{family}-native"
        convert(folder / f"{family}-hf", native)
        for kind in KINDS:
            quantize_checkpoint(native, folder / f"{family}-{kind}", ["transformer"], kind)


def ours(folder: Path, family: str, part: str, dtype: str, stored: str = "native") -> np.ndarray:
    """This library's result in float32. stored: "native", or a kind of 8-bit weights."""
    import jax
    import jax.numpy as jnp

    from cogvideox_flax.checkpoint import load_component

    given = {name: jnp.asarray(x) for name, x in inputs(family, part).items()}
    module = load_component(component_of(part), folder / f"{family}-{stored}", dtype)

    def call(module: Any, given: Any) -> Any:
        if part == "encode":
            return module.encode(given["video"])[0]
        if part == "decode":
            return module.decode(given["latents"])
        if part != "transformer":
            return module(*given.values())
        if family == "cogvideox":
            return module(given["latents"], given["context"], TIMESTEP)
        return module(given["latents"], TIMESTEP, **{n: x for n, x in given.items() if n != "latents"})

    return np.asarray(jax.jit(call)(module, given), np.float32)


def theirs(folder: Path, family: str, part: str, dtype: str) -> np.ndarray:
    """The reference's result in float32, in this library's layout."""
    import diffusers
    import torch
    import transformers

    torch.backends.cudnn.allow_tf32 = False  # float32 is float32 on both sides
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = getattr(torch, dtype)
    classes: dict[tuple[str, str], Any] = {
        ("cogvideox", "text_encoder"): transformers.T5EncoderModel,
        ("cogvideox", "transformer"): diffusers.CogVideoXTransformer3DModel,
        ("cogvideox", "vae"): diffusers.AutoencoderKLCogVideoX,
        ("hunyuan", "text_encoder"): transformers.Qwen2_5_VLTextModel,
        ("hunyuan", "text_encoder_2"): transformers.T5EncoderModel,
        ("hunyuan", "image_encoder"): transformers.SiglipVisionModel,
        ("hunyuan", "transformer"): diffusers.HunyuanVideo15Transformer3DModel,
        ("hunyuan", "vae"): diffusers.AutoencoderKLHunyuanVideo15,
    }
    component = component_of(part)
    module = classes[family, component].from_pretrained(folder / f"{family}-hf" / component, torch_dtype=kind)
    module = module.to(device).eval()
    given = {n: torch.tensor(x).to(device) for n, x in inputs(family, part).items()}
    given = {n: x.to(kind) if x.is_floating_point() else x.long() for n, x in given.items()}

    def call() -> Any:
        if part == "image_encoder":
            return module(pixel_values=given["images"].permute(0, 3, 1, 2)).last_hidden_state
        if part.startswith("text_encoder"):
            if family == "hunyuan" and part == "text_encoder":
                return module(given["ids"], output_hidden_states=True).hidden_states[-3]
            return module(given["ids"])[0]
        if part == "encode":
            mean = module.encode(given["video"].permute(0, 4, 1, 2, 3)).latent_dist.mean
            return mean.permute(0, 2, 3, 4, 1)
        if part == "decode":
            return module.decode(given["latents"].permute(0, 4, 1, 2, 3)).sample.permute(0, 2, 3, 4, 1)
        t = torch.full((2,), TIMESTEP, device=device, dtype=kind)
        if family == "hunyuan":
            x, masks = given["latents"].permute(0, 4, 1, 2, 3), ("text_mask", "glyph_mask")
            text, glyphs = (given[name].float() for name in masks)
            out = module(
                x,
                t,
                encoder_hidden_states=given["text"],
                encoder_attention_mask=text,
                encoder_hidden_states_2=given["glyphs"],
                encoder_attention_mask_2=glyphs,
                image_embeds=given["image"],
                return_dict=False,
            )[0]
            return out.permute(0, 2, 3, 4, 1)
        height, width = (8 * n for n in GRID[1:])
        shape = type("Config", (), {"transformer": module, "vae_scale_factor_spatial": 8})()
        rotary = diffusers.CogVideoXPipeline._prepare_rotary_positional_embeddings(
            shape, height, width, GRID[0], torch.device(device)
        )
        x = given["latents"].permute(0, 1, 4, 2, 3)
        return module(x, given["context"], t, image_rotary_emb=rotary, return_dict=False)[0].permute(0, 1, 3, 4, 2)

    with torch.no_grad():
        return call().float().cpu().numpy()


def embedded(steps: int) -> np.ndarray:
    """Frames of the embedded model, uint8, from noise that is the same on every device."""
    from cogvideox_flax import Pipeline
    from cogvideox_flax.generate.request import GenerationRequest

    pipe = Pipeline.from_pretrained(None, "float32")
    prompt = "a red circle moves to the right on a white background"
    shape = pipe.resolve(GenerationRequest(prompt)).size.latent_shape(1)
    latents = np.random.default_rng(0).standard_normal(shape, np.float32)
    return pipe(prompt, latents=latents, num_inference_steps=steps, progress=False).frames


TRAINING = """
model = "embedded"
clips = "{folder}/clips"
out = "{folder}/run"
method = "{method}"
num_frames = 9
height = 32
width = 48
batch = 2
[lora]
rank = 4
[loop]
steps = 4
dtype = "{dtype}"
log_every = 1
[optimizer]
learning_rate = 1e-3
warmup_steps = 0
"""


def fine_tuned(folder: Path, method: str, dtype: str) -> dict[str, list[float]]:
    """Losses and norms of the gradients of four steps from the embedded model.

    Args:
        folder: an empty one.
        method: "lora" or "full".
        dtype: of the forward and backward passes.
    """
    from cogvideox_flax.io.video import save_video
    from cogvideox_flax.training.config import read_config
    from cogvideox_flax.training.finetune import TRAINING_DIR, finetune
    from cogvideox_flax.training.job import check
    from cogvideox_flax.training.loop import METRICS_FILE
    from cogvideox_flax.training.metrics import read_metrics

    image = np.random.default_rng(0).integers(0, 256, (32, 48, 3)).astype(np.uint8)
    # directories of PNGs: the machine may have no ffmpeg
    for name, step in (("left", -2), ("right", 2)):
        save_video(folder / "clips" / name, np.stack([np.roll(image, i * step, 1) for i in range(9)]), 8)
        (folder / "clips" / f"{name}.txt").write_text(f"a red circle moves to the {name}")
    (folder / "config.toml").write_text(TRAINING.format(folder=folder, method=method, dtype=dtype))
    assert finetune(check(read_config(folder / "config.toml")))
    lines = read_metrics(folder / "run" / TRAINING_DIR / METRICS_FILE)
    return {name: [line[name] for line in lines if name in line] for name in ("loss", "gradient_norm")}


def cudnn_of_torch() -> dict[str, Any]:
    """The version that PyTorch has loaded; before 9.15 its 3-D convolutions, which diffusers' autoencoder uses, are
    wrong in bfloat16 on large shapes."""
    import torch

    return {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version(), "cuda": torch.cuda.is_available()}


def seen_by_jax() -> dict[str, Any]:
    """The device, JAX's version and its cuDNN, and a fault if it is no NVIDIA GPU that the kernels run on."""
    import jax

    from cogvideox_flax.attention import nvidia

    device = jax.devices()[0]
    gib = (device.memory_stats() or {}).get("bytes_limit", 0) / 2**30
    found = {"device": device.device_kind, "jax": jax.__version__, "cudnn": nvidia.cudnn_version(), "gib": gib}
    return found | {"fault": nvidia.why_not(64) or ""}
