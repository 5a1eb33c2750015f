"""Fine-tuning of a text-to-video release on a folder of clips: adapters (LoRA) or all weights of its transformer.

What is in the run's folder, in the order in which it appears:

    finetune.json                       what the run is made of; a run of something else is refused there
    prepared/                           latents and text features of the clips, computed once
    training/                           states and metrics.jsonl, from which a stopped run goes on
    samples/000200.png                  videos of the sample prompts, a row each
    pytorch_lora_weights.safetensors    for `cogvideox generate --lora` (and diffusers); or, with all weights trained,
    checkpoint/                         for `cogvideox generate --model`
    loss.png
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float32, Key

from cogvideox_flax import checkpoint, sharding
from cogvideox_flax.checkpoint import Manifest, hub
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate import stage_files, stages
from cogvideox_flax.generate.checks import check_model, check_prompts, check_sampling
from cogvideox_flax.generate.pipeline import CogVideoXPipeline
from cogvideox_flax.generate.programs import OFS
from cogvideox_flax.io.contents import match_record
from cogvideox_flax.io.video import from_uint8, save_contact_sheet
from cogvideox_flax.lora import add_lora, lora_parameters, save_lora, with_parameters
from cogvideox_flax.models.cogvideox.sizes import Size, resolve_size
from cogvideox_flax.models.cogvideox.transformer import Transformer
from cogvideox_flax.models.family import ModelFamily
from cogvideox_flax.runtime.compile import compiler_options
from cogvideox_flax.schedulers import make_scheduler
from cogvideox_flax.training import clips as clip_folder
from cogvideox_flax.training.clips import Clip
from cogvideox_flax.training.latent_cache import Store, prepare
from cogvideox_flax.training.loop import State, train
from cogvideox_flax.training.metrics import plot_metrics
from cogvideox_flax.training.objectives import drop_captions, sample_latents, v_prediction
from cogvideox_flax.training.order import examples_of_step
from cogvideox_flax.training.recipe import FinetuneConfig, settings

log = logging.getLogger(__name__)

RECORD_FILE = "finetune.json"
CHECKPOINT_DIR = "checkpoint"
SHARD = 16
"""Clips per file of prepared examples: what a killed preparation loses at most."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run that its settings, clips and model's configs allow; nothing is converted, loaded or written yet.

    tokens: video tokens of one clip, on top of the text's.
    parameters: of the whole transformer; trainable: those that are trained.
    """

    config: FinetuneConfig
    manifest: Manifest
    mesh: Mesh | None
    size: Size
    fps: int
    clips: list[Clip]
    tokens: int
    parameters: int
    trainable: int

    def memory(self) -> dict[str, int]:
        """Bytes over all devices of what lies there for the whole run, by kind. Activations come on top."""
        loop = self.config.loop
        half = jnp.dtype(loop.dtype).itemsize
        full = self.config.method == "full"
        return {
            "weights that stay as they are": 0 if full else half * self.parameters,
            "trained weights": 4 * self.trainable,
            f"their {loop.dtype} copy": half * self.trainable if half < 4 else 0,
            "gradients": 4 * self.trainable,
            "moments": 8 * self.trainable,
            "moving average": 4 * self.trainable if loop.ema_decay else 0,
        }

    def disk(self) -> int:
        """Bytes that the run will write, about."""
        config, size, configs = self.config, self.size, self.manifest.configs
        transformer = configs["transformer"]
        latents = size.latent_frames * size.latent_height * size.latent_width * configs["vae"].latent_channels
        example = 2 * 2 * latents + 4 * transformer.text_length * transformer.text_width
        state = (16 if config.loop.ema_decay else 12) * self.trainable
        return len(self.clips) * example + (config.loop.keep + 1) * state + 4 * self.trainable

    def describe(self) -> str:
        """What the run would do, for people."""
        config, size, transformer = self.config, self.size, self.manifest.configs["transformer"]
        release = self.manifest.release
        memory = {name: nbytes for name, nbytes in self.memory().items() if nbytes}
        rows = {
            "model": f"{config.model or hub.EMBEDDED.name} ({release.name if release else 'no released architecture'})",
            "clips": f"{len(self.clips)} in {config.clips}",
            "size": f"{size.num_frames} frames of {size.height}x{size.width} at {self.fps} fps",
            "tokens": f"{self.tokens:,} of video and {transformer.text_length} of text per clip",
            "training": f"{self.trainable:,} of {self.parameters:,} parameters ({config.method})",
            "steps": f"{config.loop.steps} of {config.batch} clips in {config.loop.accumulate} micro-batches, "
            f"{config.loop.steps * config.batch / len(self.clips):.1f} times each clip",
            "memory": f"{_gib(sum(memory.values()))} over all devices, and activations",
            **{f"  {name}": _gib(nbytes) for name, nbytes in memory.items()},
            "disk": f"{_gib(self.disk())} in {config.out}",
        }
        width = max(map(len, rows))
        return "\n".join(f"{name:{width}}  {text}" for name, text in rows.items())


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


def check(config: FinetuneConfig) -> Plan:
    """Check a run as far as is possible before anything is converted, loaded or written.

    Raises:
        InputError: a model that cannot be trained (image-to-video, incomplete), a size, mesh or batch that does not
            fit it, faulty clips, prompts or sampling options, or a folder that cannot be written.
    """
    loop, sample = config.loop, config.sample
    where = config.model or hub.EMBEDDED
    mesh = sharding.make_mesh(*sharding.parse_mesh(config.mesh)) if config.mesh is not None else None
    manifest = hub.peek(config.model, config.revision)
    check_model(manifest, where, loop.dtype, mesh)
    if manifest.quantized("transformer"):
        raise InputError(
            f"the transformer of {where} is quantized and cannot be trained; take the checkpoint it is from"
        )
    release, configs = manifest.release, manifest.configs
    transformer = configs["transformer"]
    size = resolve_size(
        transformer, configs["vae"], release, num_frames=config.num_frames, height=config.height, width=config.width
    )
    if mesh is not None:
        sharding.named(mesh, ("batch",), (config.batch // loop.accumulate,), "the clips of a micro-batch")
    if sample.prompts:
        check_prompts(sample.prompts)
        check_sampling(sample.guidance_scale, False, sample.seed)
        make_scheduler(configs["scheduler"]).plan(sample.num_inference_steps)
        sharding.check_batch(mesh, len(sample.prompts) * (2 if sample.guidance_scale > 1 else 1))
    fps = release.fps if release is not None else 16 if transformer.patch_size_t else 8
    base = manifest.abstract("transformer")
    parameters = sum(x.size for x in jax.tree.leaves(base))
    trainable = parameters
    if config.method == "lora":
        adapted = jax.eval_shape(partial(_with_lora, family=manifest.model_family, config=config, mesh=None), base)
        trainable = sum(x.size for x in lora_parameters(adapted).values())
    plan = Plan(
        config=config,
        manifest=manifest,
        mesh=mesh,
        size=size,
        fps=fps,
        clips=clip_folder.find_clips(config.clips, size.num_frames, fps),
        tokens=size.latent_frames * size.latent_height * size.latent_width // transformer.patch_volume,
        parameters=parameters,
        trainable=trainable,
    )
    stages.check_folder(config.out, plan.disk())
    return plan


def finetune(plan: Plan, *, stop_after: Callable[[int], bool] | None = None, progress: bool = True) -> Path | None:
    """Prepare the clips, train, and write what was trained; go on from what is in the run's folder.

    Args:
        plan: from `check`.
        stop_after: asked after each step; True ends the run there, in order. SIGTERM and Ctrl-C do the same.
        progress: progress on stderr.

    Returns:
        The LoRA file or the native checkpoint; None if the run was stopped before its last step.

    Raises:
        InputError: the folder holds a run of something else, or something there cannot be read or written.
        DivergedError: the loss is NaN or infinite.
    """
    config, mesh, out = plan.config, plan.mesh, plan.config.out
    native = hub.resolve(config.model, config.revision, progress=progress)
    with stages.run_dir_lock(out):
        pipe = CogVideoXPipeline(native, config.loop.dtype, mesh)
        contents = clip_folder.fingerprint(plan.clips)
        _check_record(plan, pipe, contents)
        texts = _prepare_texts(plan, pipe, contents, progress)
        empty, *prompts = _prompt_features(plan, pipe, progress)
        pipe.release("text_encoder")
        latents = _prepare_latents(plan, pipe, contents)
        pipe.release("vae")

        def batches(step: int) -> dict[str, np.ndarray]:
            indices = examples_of_step(step, batch=config.batch, count=len(plan.clips), seed=config.loop.seed)
            return {**latents.gather(indices), **texts.gather(indices)}

        frozen: dict[str, Any] = {"empty": empty}
        if config.method == "lora":
            frozen["transformer"] = _with_lora(
                pipe.transformer, family=plan.manifest.model_family, config=config, mesh=mesh
            )
            pipe.release("transformer")
        on_step = partial(_draw, plan, pipe, frozen, np.stack([empty, *prompts])) if prompts else None
        state = train(
            _initial_params(plan, native, frozen),  # unnamed: the loop lets go of it once it has its float32 copy
            frozen,
            partial(_loss, plan=plan),
            batches,
            config.loop,
            out / "training",
            mesh=mesh,
            on_step=on_step,
            stop_after=stop_after,
        )
        if int(state.step) < config.loop.steps:
            return None
        trained = _assembled(state.result, frozen)
        if config.method == "lora":
            result = save_lora(plan.manifest.model_family, out, trained)
        else:
            result = _save_checkpoint(plan, pipe.manifest, native, trained)
        plot_metrics([out / "training" / "metrics.jsonl"], ("loss", "gradient_norm"), out / "loss.png")
        return result


def _with_lora(
    transformer: Transformer, *, family: ModelFamily, config: FinetuneConfig, mesh: Mesh | None
) -> Transformer:
    lora, rngs = config.lora, nnx.Rngs(config.loop.seed)
    return add_lora(family, transformer, lora.rank, lora.alpha, lora.targets, rngs=rngs, mesh=mesh)


def _initial_params(plan: Plan, native: Path, frozen: dict[str, Any]) -> dict[str, Any]:
    """Trained parameters before the first step: the adapters, or the stored weights in their stored dtype."""
    if plan.config.method == "lora":
        return {"transformer": lora_parameters(frozen["transformer"])}
    return {"transformer": checkpoint.load_transformer(native, mesh=plan.mesh)}


def _assembled(params: dict[str, Any], frozen: dict[str, Any]) -> Transformer:
    """The transformer with what is trained in its place."""
    if "transformer" in frozen:
        return with_parameters(frozen["transformer"], params["transformer"])
    return params["transformer"]


def _loss(params: Any, frozen: Any, batch: Any, key: Key[Array, ""], *, plan: Plan) -> Any:
    """v-prediction on samples of the clips' latents, some with the empty caption."""
    configs = plan.manifest.configs
    sample_key, drop_key, noise_key = jax.random.split(key, 3)
    scaling_factor = configs["vae"].scaling_factor
    latents = sample_latents(batch["mean"], batch["std"], sample_key, scaling_factor, plan.size.extra_latents)
    context = drop_captions(batch["text"], frozen["empty"], plan.config.caption_dropout, drop_key)
    transformer = _assembled(params, frozen)
    ofs = None if configs["transformer"].ofs_width is None else OFS

    def denoiser(x: Array, t: Array) -> Array:
        return transformer(x, context, t, ofs, remat=plan.config.remat)

    return v_prediction(denoiser, latents, noise_key, configs["scheduler"])


def _check_record(plan: Plan, pipe: CogVideoXPipeline, contents: str) -> None:
    """Remember what the run is made of, and refuse to go on from a run of something else."""
    size = plan.size
    parts = {
        "clips": contents,
        "size": [size.num_frames, size.height, size.width],
        "fps": plan.fps,
        **{name.replace("_", " "): mark for name, mark in pipe.fingerprints().items()},
    }
    ours = json.loads(json.dumps(settings(plan.config) | parts))
    path = plan.config.out / RECORD_FILE
    theirs = match_record(path, ours)
    differing = [name for name in ours if ours[name] != theirs.get(name)]
    if differing:
        raise InputError(
            f"{plan.config.out} holds a run of something else:\n"
            + "\n".join(f"  {name}: there {theirs.get(name)}, now {ours[name]}" for name in differing)
            + "\nChoose another folder, or the same settings, clips and model to go on."
        )


def _groups(indices: Sequence[int], mesh: Mesh | None) -> list[tuple[list[int], int]]:
    """Indices in groups of one per dp device, the last filled up by repeating, each with its number of real ones."""
    size = mesh.shape["dp"] if mesh is not None else 1
    groups = [list(indices[i : i + size]) for i in range(0, len(indices), size)]
    return [(group + group[-1:] * (size - len(group)), len(group)) for group in groups]


def _encode_texts(pipe: CogVideoXPipeline, texts: Sequence[str], progress: bool) -> Float32[np.ndarray, "N L E"]:
    rows = []
    for group, count in _groups(range(len(texts)), pipe.mesh):
        features, _ = pipe.encode_prompts([texts[i] for i in group], progress=progress)
        rows.append(np.asarray(features, np.float32)[:count])
    return np.concatenate(rows)


def _prepare_texts(plan: Plan, pipe: CogVideoXPipeline, contents: str, progress: bool) -> Store:
    """`text` [L, E] of each clip: float32, so exact whatever the dtype that it was computed in."""

    def make(indices: range) -> dict[str, np.ndarray]:
        return {"text": _encode_texts(pipe, [plan.clips[i].caption for i in indices], progress)}

    return _prepare(plan, pipe, ("text_encoder", "tokenizer"), contents, make)


def _prompt_features(plan: Plan, pipe: CogVideoXPipeline, progress: bool) -> Float32[np.ndarray, "N L E"]:
    """Features of the empty prompt and of the sample prompts, which may be others when a run goes on."""
    path = plan.config.out / "prepared" / "prompts.safetensors"
    prompts = ["", *plan.config.sample.prompts]
    key = json.dumps([prompts, pipe.dtype, [pipe.fingerprints()[name] for name in ("tokenizer", "text_encoder")]])
    if not stage_files.is_fresh(path, key):
        stage_files.save(path, {"features": _encode_texts(pipe, prompts, progress)}, {"settings": key})
    return stage_files.load(path, ("features",), "cogvideox train")[0]["features"]


def _prepare_latents(plan: Plan, pipe: CogVideoXPipeline, contents: str) -> Store:
    """`mean` and `std` [t, h, w, C] of each clip's posterior, raw.

    In float16: latents stay within tens, and its relative step of 1/2048 is finer than the noise of any timestep.
    """
    size = plan.size
    encode = jax.jit(lambda vae, video: vae.encode(video), compiler_options=compiler_options(pipe.dtype))

    def make(indices: range) -> dict[str, np.ndarray]:
        means, stds = [], []
        for group, count in _groups(indices, plan.mesh):
            video = np.stack([_load(plan.clips[i], size, plan.fps) for i in group])
            place = sharding.named(plan.mesh, ("batch",), video.shape, "clips") if plan.mesh is not None else None
            mean, logvar = encode(pipe.vae, jax.device_put(video, place))
            means.append(np.asarray(mean, np.float16)[:count])
            stds.append(np.exp(0.5 * np.asarray(logvar, np.float32)).astype(np.float16)[:count])
        latents = {"mean": np.concatenate(means), "std": np.concatenate(stds)}
        if not all(np.isfinite(value).all() for value in latents.values()):
            names = ", ".join(plan.clips[i].name for i in indices)
            raise InputError(f"the VAE gives NaN or infinity in {pipe.dtype} for some of {names}; train in float32")
        return latents

    return _prepare(plan, pipe, ("vae",), contents, make)


def _load(clip: Clip, size: Size, fps: int) -> Float32[np.ndarray, "F H W 3"]:
    frames = clip_folder.load_clip(clip.path, size.num_frames, size.height, size.width, fps)
    return from_uint8(frames)


def _prepare(
    plan: Plan,
    pipe: CogVideoXPipeline,
    parts: tuple[str, ...],
    contents: str,
    make: Callable[[range], dict[str, np.ndarray]],
) -> Store:
    """Examples that these parts of the checkpoint make, kept in a folder named after the first."""
    size, marks = plan.size, pipe.fingerprints()
    meta = {
        "clips": contents,
        "size": [size.num_frames, size.height, size.width],
        "fps": plan.fps,
        "model": [marks[name] for name in parts],
        "dtype": pipe.dtype,
    }

    def report(done: int, count: int) -> None:
        log.info("%s: %d of %d clips prepared", parts[0], done, count)

    folder = plan.config.out / "prepared" / parts[0]
    return prepare(folder, len(plan.clips), make, shard_size=SHARD, meta=meta, progress=report)


def _draw(
    plan: Plan,
    pipe: CogVideoXPipeline,
    frozen: dict[str, Any],
    features: Float32[np.ndarray, "N L E"],
    done: int,
    state: State,
) -> None:
    """Videos of the sample prompts with the weights that the run would give out now, as a sheet with a row for each.

    Adapters are used where they lie, beside the base; trained weights in float32 are cast for as long as it takes.
    """
    sample, size = plan.config.sample, plan.size
    if done % sample.every and done != plan.config.loop.steps:
        return
    params = jax.tree.map(lambda x: x.astype(pipe.dtype), state.result)
    pipe.use("transformer", _assembled(params, frozen))
    empty, prompts = features[:1], features[1:]
    guided = sample.guidance_scale > 1
    latents, _ = pipe.denoise(
        prompts,
        np.repeat(empty, len(prompts), 0) if guided else None,
        size,
        num_inference_steps=sample.num_inference_steps,
        guidance_scale=sample.guidance_scale,
        seed=sample.seed,
        progress=False,
    )
    pipe.release("transformer")  # before the next step, which overwrites the trained weights
    video = np.asarray(pipe.decode_latents(latents[:, size.extra_latents :], progress=False))
    pipe.release("vae")
    shown = np.linspace(0, size.num_frames - 1, min(sample.frames, size.num_frames)).round().astype(int)
    path = plan.config.out / "samples" / f"{done:06d}.png"
    save_contact_sheet(path, video[:, shown].reshape(-1, *video.shape[2:]), columns=len(shown))
    log.info("samples of step %d in %s", done, path)


def _save_checkpoint(plan: Plan, manifest: Manifest, native: Path, transformer: Transformer) -> Path:
    """A native checkpoint with the trained transformer and the other components of the model that it came from."""
    target = plan.config.out / CHECKPOINT_DIR
    source = {
        "path": str(plan.config.out.absolute()),
        "steps": plan.config.loop.steps,
        "base": manifest.weights["transformer"].get("source", {}),
    }
    stored = manifest.weights["transformer"]["dtype"]
    checkpoint.save(target, manifest, {"transformer": transformer}, stored, source, kept=native)
    return target
