"""Where the finished work of a run is kept: in memory, or in a directory from which a later run continues.

The files of a directory, their layouts and their metadata are those of the torchax reference system for TPUs, so a run
can move between the two: `generation_config.json`, `stage1_embeddings.safetensors`, `stage2_latents.safetensors` and
`output_video.mp4`. `stage2_state.safetensors` is where an interrupted denoising loop continues. Each is written
atomically and says what it was made of, so that only matching work is taken over.

On several hosts the directory is process 0's: it alone reads and writes there, and sends the others what it holds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Float32

from cogvideox_flax.errors import CheckpointError, InputError, NonFiniteError
from cogvideox_flax.generate.denoise import DenoiseState
from cogvideox_flax.generate.encode import NEGATIVE, VIDEO_FEATURE, Conditioning, text_features
from cogvideox_flax.generate.media import MEDIA, Media
from cogvideox_flax.generate.model_choice import ModelChoice
from cogvideox_flax.generate.predict.adaptive import FULL, AdaptiveState
from cogvideox_flax.generate.predict.step_cache import StepCache
from cogvideox_flax.generate.recipe import deciding, request_values, unhashed
from cogvideox_flax.generate.request import GenerationRequest, check_option, json_type, recorded
from cogvideox_flax.generate.resolve import check_prompts, plain
from cogvideox_flax.generate.run import Run
from cogvideox_flax.io.atomic import file_lock, remove_orphans
from cogvideox_flax.io.contents import is_as_written, write_record
from cogvideox_flax.io.paths import check_free_space, check_writable
from cogvideox_flax.io.tensor_file import TensorFile, write_tensors
from cogvideox_flax.io.values import load_json, typed
from cogvideox_flax.runtime.global_arrays import fetch, fetch_on_first
from cogvideox_flax.runtime.multihost import hosts

log = logging.getLogger(__name__)

CONFIG_FILE = "generation_config.json"
EMBEDDINGS_FILE = "stage1_embeddings.safetensors"
LATENTS_FILE = "stage2_latents.safetensors"
STATE_FILE = "stage2_state.safetensors"
VIDEO_FILE = "output_video.mp4"
LOCK_FILE = ".lock"

_THEIR_NAMES = {"num_frames": "frames"}
"""Field of the request -> its name in the settings, where the reference system calls it otherwise."""


class Memory:
    """Finished work of a run in memory: what the stages of one video hand on.

    Args:
        text: text features of the run's prompts, computed earlier.
    """

    one_stage_at_a_time = False
    """Whether one stage is done for all seeds before the next."""

    negative: bool | None = None
    """Whether negative prompts are encoded; None: where guidance needs them."""

    def __init__(self, text: Conditioning | None = None):
        self.text = text
        self._conditioning = text
        self._state: DenoiseState | None = None

    def of(self, run: Run) -> Memory:
        """The store for the seeds of this run."""
        return self

    def has_conditioning(self, run: Run) -> bool:
        return False

    def save_conditioning(self, run: Run, conditioning: Conditioning) -> None:
        self._conditioning = conditioning

    def conditioning(self, run: Run) -> Conditioning:
        assert self._conditioning is not None
        return self._conditioning

    def latents_key(self, run: Run, conditioning: Conditioning) -> str:
        return ""

    def has_latents(self, run: Run, key: str) -> bool:
        return False

    def states(self, run: Run, key: str) -> AbstractContextManager[States]:
        """No state is kept."""
        return nullcontext(States())

    def save_latents(self, run: Run, key: str, state: DenoiseState) -> None:
        self._state = dataclasses.replace(state, scheduler_state=None, cache=None)  # a step cache may be large

    def latents(self, run: Run) -> Float32[Any, "B T h w C"]:
        """The latents as the decoder takes them."""
        assert self._state is not None
        return self._state.video_latents

    def output_latents(self) -> Float32[Any, "B T h w C"]:
        """The latents that `output_type="latent"` returns: with the extra latent frames."""
        assert self._state is not None
        return fetch(self._state.latents)


class States:
    """Keeps no state of a denoising loop."""

    def found(self, mesh: Mesh | None) -> DenoiseState | None:
        """The state from which an interrupted run continues; None: from the first step."""
        return None

    def keep(self, state: DenoiseState) -> None:
        """Take the state after a step."""


@dataclass(frozen=True)
class RunDirectory:
    """Finished work of a run in a directory, from which a later run continues.

    choice: the model, as the user named it.
    fingerprints: part of the checkpoint -> fingerprint of its config and contents; empty until it is open.
    by_seed: each seed has a directory of its own below.
    """

    folder: Path
    choice: ModelChoice
    fingerprints: dict[str, str] = dataclasses.field(default_factory=dict)
    by_seed: bool = False

    one_stage_at_a_time = True
    text = None  # features are read from the directory
    negative = True  # also where guidance is off: a run with another guidance scale continues from them

    def of(self, run: Run) -> RunDirectory:
        """The store for the seeds of this run.

        Raises:
            InputError: it is not done in stages: one_program, or latents as the result.
        """
        if run.request.one_program or run.request.output_type == "latent":
            raise InputError(
                "a run directory holds the results of stages, its latents among them; leave one_program off, and "
                'output_type "latent" out'
            )
        return dataclasses.replace(self, by_seed=run.request.num_videos > 1)

    def _folder(self, run: Run, is_shared: bool = False) -> Path:
        return self.folder / f"seed-{run.request.seed}" if self.by_seed and not is_shared else self.folder

    def _embeddings_folder(self, run: Run) -> Path:
        return self._folder(run, is_shared=not run.encodes_by_seed)

    def _key(self, run: Run, settings: dict[str, Any], parts: tuple[str, ...], **more: Any) -> str:
        """Everything that decides a stage's result: settings, parts of the checkpoint, and more."""
        fingerprints = {name: self.fingerprints[name] for name in parts}
        return json.dumps({**settings, "dtype": run.dtype, "model": fingerprints, **more}, ensure_ascii=False)

    @hosts.on_process_0
    def _write_settings(self, folder: Path, run: Run) -> None:
        """Write `generation_config.json`; one prompt is written as the reference system does."""
        folder.mkdir(parents=True, exist_ok=True)
        choice = self.choice
        own = {"model_id": choice.model_id, "revision": choice.revision, "fingerprints": self.fingerprints}
        more = {"transformer": choice.transformer, "variant": choice.variant}
        own |= {name: value for name, value in more.items() if value is not None}
        raw = {"prompt": run.request.prompt, **settings_json(run), **own, "dtype": run.dtype}
        prompts = {name: one_or_all(raw[name]) for name in ("prompt", "negative_prompt")}
        write_record(folder / CONFIG_FILE, raw | prompts)

    # --- stage 1

    def has_conditioning(self, run: Run) -> bool:
        """Whether stage 1's file is there and made of the same; the run's settings are written first."""
        folder = self._embeddings_folder(run)
        self._write_settings(folder, run)
        return is_fresh(folder / EMBEDDINGS_FILE, self._conditioning_key(run))

    def _conditioning_key(self, run: Run) -> str:
        made_of = _prompts(run) | {"arrays": deciding(request_values(run), "encode")["arrays"]}
        components = [stage.component for stage in run.model.text] + [stage.component for stage in run.visual]
        if run.visual:  # a run of text alone does not depend on these
            size = {name: getattr(run.request, name) for name in ("num_frames", "height", "width", "tiling")}
            made_of = _deciding_visual_latents(run) | size
        return self._key(run, made_of, ("tokenizer", *dict.fromkeys(components)))

    def save_conditioning(self, run: Run, conditioning: Conditioning) -> None:
        """Write each text feature, float32 [B, ...] (`prompt_embeds` [B, L, E]), and that of the negative prompt, where
        there is one, under the same name after "negative_"; and the latents of each image and clip, float32
        [B, C, T, h, w], scaled."""
        tensors = {name: fetch(value) for name, value in conditioning.text.items()}
        tensors |= {NEGATIVE + name: fetch(value) for name, value in (conditioning.negative_text or {}).items()}
        video = {} if conditioning.video is None else {VIDEO_FEATURE: conditioning.video}
        tensors |= {name: _in_file(fetch(x)) for name, x in (conditioning.visual | video).items()}
        metadata = {"settings": self._conditioning_key(run), **_prompts(run), "model_id": self.choice.model_id}
        write_stage(self._embeddings_folder(run) / EMBEDDINGS_FILE, tensors, metadata)

    def conditioning(self, run: Run) -> Conditioning:
        """Stage 1's result, for this run's guidance.

        Raises:
            InputError: the file is missing, damaged, holds NaN, or is not of these prompts or not for this model.
        """
        tensors = self.read_features(run)
        latents = {stage.feature: tensors.pop(stage.feature) for stage in run.visual}
        return Conditioning(**text_features(tensors), visual=latents, video=latents.pop(VIDEO_FEATURE, None))

    def read_features(self, run: Run) -> dict[str, Float32[np.ndarray, "B ..."]]:
        """Stage 1's features, latents as [B, T, h, w, C], by their names in the file; errors as for `conditioning`."""
        path, again = self._embeddings_folder(run) / EMBEDDINGS_FILE, "run `cogvideox encode` again"
        shapes = run.model.feature_shapes(run.batch)
        shapes |= {NEGATIVE + name: shape for name, shape in shapes.items() if run.guided}
        visual = {stage.feature: run.feature_shape(stage) for stage in run.visual}
        shapes |= {name: _in_file(np.empty(shape, bool)).shape for name, shape in visual.items()}
        tensors, metadata = read_stage(path, tuple(shapes), "cogvideox encode")
        for name, value in tensors.items():
            if value.shape != shapes[name]:
                raise InputError(f"{path}: {name} is {list(value.shape)}, this run needs {list(shapes[name])}; {again}")
        check_recorded_settings(path, metadata, _prompts(run), again)
        if run.visual:
            check_key(path, metadata, _deciding_visual_latents(run), again)
        return tensors | {name: _from_file(tensors[name]) for name in visual}

    # --- stage 2

    def latents_key(self, run: Run, conditioning: Conditioning) -> str:
        """A fingerprint of all that decides the latents."""
        parts = run.model.denoiser, "scheduler"
        features = [np.asarray(x).tobytes() for x in jax.tree.leaves(conditioning)]
        embeddings = hashlib.sha256(b"".join(features)).hexdigest()
        more = {"embeddings": embeddings} | _shared_noise(run) | unhashed(run)
        return self._key(run, deciding(request_values(run), "encode", "denoise"), parts, **more)

    def has_latents(self, run: Run, key: str) -> bool:
        """Whether stage 2's file is there and has this key; the run's settings are written first."""
        self._write_settings(self._folder(run), run)
        return is_fresh(self._folder(run) / LATENTS_FILE, key)

    def states(self, run: Run, key: str) -> StateKeeper:
        """What keeps the state of the denoising loop."""
        if unhashed(run):
            log.warning(
                "%r is a scheduler from outside cogvideox_flax, whose code is not known: what this run keeps is not "
                "used again",
                run.scheduler,
            )
        return StateKeeper(self._folder(run) / STATE_FILE, key, run)

    def save_latents(self, run: Run, key: str, state: DenoiseState) -> None:
        """Write stage 2's file: the latents as the decoder takes them, without the extra latent frames."""
        values = _latents_metadata(request_values(run) | {"dtype": run.dtype})
        metadata = {name: value for name, value in values.items() if value is not None}
        metadata = {"settings": key, **metadata}
        tensors = {"latents": _in_file(fetch(state.video_latents))}
        write_stage(self._folder(run) / LATENTS_FILE, tensors, metadata)

    def latents(self, run: Run) -> Float32[np.ndarray, "B T h w C"]:
        """Stage 2's result, as the decoder takes it; errors as for `read_latents`."""
        values = request_values(run) | {"dtype": run.dtype, "fingerprints": self.fingerprints}
        return read_latents(self._folder(run), values, run.model.codec.latent_channels)


Store = Memory | RunDirectory
"""Where finished work is kept."""


def settings_json(run: Run) -> dict[str, Any]:
    """The same but for the prompts and what is None, as JSON values under the names of the settings."""
    values = {name: value for name, value in request_values(run).items() if name != "prompt"}
    values |= {name: [each.facts() for each in values[name]] for name in MEDIA if values.get(name)}
    values["asked"] = sorted(run.asked)
    return {_THEIR_NAMES.get(name, name): value for name, value in values.items() if value is not None}


def request_json(request: GenerationRequest) -> dict[str, Any]:
    """All fields of a request of the command line as JSON values, from which another host makes the same."""
    values = {field.name: getattr(request, field.name) for field in dataclasses.fields(GenerationRequest)}
    return values | {name: [each.facts() for each in values[name]] for name in MEDIA if values[name]}


def request_of_json(values: Mapping[str, Any]) -> GenerationRequest:
    """The inverse of `request_json`, with the facts of images and clips alone."""
    media = {name: [Media.of(facts) for facts in values[name]] for name in MEDIA if values[name]}
    return GenerationRequest(**{**values, **media})


def _prompts(run: Run) -> dict[str, Any]:
    return {"prompt": run.request.prompt, "negative_prompt": run.request.negative_prompt}


def _shared_noise(run: Run) -> dict[str, Any]:
    return {"same_noise": True} if run.request.same_noise else {}


def _deciding_visual_latents(run: Run) -> dict[str, Any]:
    """What the latents of images and clips depend on, but for their size; the seed draws the posterior's noise."""
    seed = {"seed": run.request.seed} | _shared_noise(run) if run.encodes_by_seed else {}
    return deciding(request_values(run), "encode") | seed


def _latents_metadata(values: Mapping[str, Any]) -> dict[str, Any]:
    """What latents were made with: the reference system's metadata, and ours where we know it."""
    names = ("prompt", "negative_prompt", *recorded("denoise"), "dtype")
    return {name: plain(values[name]) for name in names if name in values}


def _in_file(x: np.ndarray) -> np.ndarray:
    """Latents as B C T H W, as the reference system stores them; other features of images as they are."""
    return np.ascontiguousarray(x.transpose(0, 4, 1, 2, 3)) if x.ndim == 5 else x


def _from_file(x: np.ndarray) -> np.ndarray:
    """The inverse of `_in_file`."""
    return x.transpose(0, 2, 3, 4, 1) if x.ndim == 5 else x


class StateKeeper(States):
    """Writes the state of the denoising loop now and then, so that a run that is killed loses little.

    A context: on an exception it writes the last state, otherwise it removes the file. Process 0 alone has the file.
    """

    MIN_INTERVAL_S = 1.0
    """Seconds between two writes."""

    MAX_TIME_SHARE = 0.05
    """Of the loop's time that writing may take."""

    def __init__(self, path: Path, key: str, run: Run):
        self._path, self._key, self._enabled = path, key, not run.request.compiled_loop
        self._run = run
        predict = run.predict
        self._keeps_cache = isinstance(predict, StepCache) and predict.is_small
        self._last: DenoiseState | None = None
        self._before: DenoiseState | None = None
        self._written, self._wait = time.monotonic(), self.MIN_INTERVAL_S

    def __enter__(self) -> Self:
        return self

    @hosts.on_process_0
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._path.unlink(missing_ok=True)
        elif self._last is not None and not issubclass(kind, NonFiniteError):
            with suppress(InputError):  # the disk may be full, which has an error of its own
                self._write(self._last)

    def found(self, mesh: Mesh | None) -> DenoiseState | None:
        """The state that a run with the same settings left, with its step cache.

        Args:
            mesh: of the run.
        """
        if not self._enabled or not is_fresh(self._path, self._key):
            return None
        tensors, metadata = read_stage(self._path, None, "cogvideox denoise")
        log.info("going on after step %s", metadata["step"])

        def read(name: str, shapes: Any) -> Any:
            leaves, tree = jax.tree.flatten(shapes)
            values = [tensors[f"{name}.{i}"].astype(leaf.dtype).reshape(leaf.shape) for i, leaf in enumerate(leaves)]
            return jax.tree.unflatten(tree, values)

        run, step = self._run, np.int32(int(metadata["step"]))
        cache = read("cache", run.cache_shapes(mesh)) if self._keeps_cache else None
        scheduler_state = read("sampler", run.scheduler_state())
        state = DenoiseState(
            step, tensors["latents"], scheduler_state, cache, run.size.extra_latents, run.scheduler.kind
        )
        return run.with_empty_cache(state, mesh)

    def keep(self, state: DenoiseState) -> None:
        """Take a state. One from which the loop cannot go on without a step cache that is not written is passed
        over."""
        if not self._enabled:
            return
        if isinstance(state.cache, AdaptiveState):
            # whether a step is full is known when it is done: then the loop can go on from the state before it
            before, self._before = self._before, dataclasses.replace(state, cache=None)
            if fetch(state.cache.full)[int(state.step) - 1] != FULL or before is None:
                return
            state = before
        elif not self._keeps_cache:
            if not self._run.may_resume(int(state.step)):
                return
            state = dataclasses.replace(state, cache=None)
        self._last = state = fetch_on_first(state)
        start = time.monotonic()
        if state is None or start - self._written < self._wait:
            return
        try:
            self._write(state)
        except InputError as e:
            log.warning("a run that is stopped now begins the denoising anew: %s", e)
        self._written = time.monotonic()
        self._wait = max(self.MIN_INTERVAL_S, (self._written - start) / self.MAX_TIME_SHARE)

    def _write(self, state: DenoiseState) -> None:
        tensors = {"latents": fetch(state.latents)}
        for name, tree in (("sampler", state.scheduler_state), ("cache", state.cache)):
            tensors |= {f"{name}.{i}": np.asarray(fetch(x)) for i, x in enumerate(jax.tree.leaves(tree))}
        write_stage(self._path, tensors, {"settings": self._key, "step": int(state.step)})
        self._last = None


def read_latents(folder: Path, settings: dict[str, Any], channels: int) -> Float32[np.ndarray, "B T h w C"]:
    """Stage 2's latents as the library has them.

    Args:
        settings: from `read_settings`.
        channels: of the latents that the decoder takes.

    Raises:
        InputError: the file is missing, damaged, holds NaN, or was made with other settings or for another VAE.
    """
    path = folder / LATENTS_FILE
    again = "run `cogvideox denoise` again"
    tensors, metadata = read_stage(path, ("latents",), "cogvideox denoise")
    latents = tensors["latents"]
    if latents.ndim != 5 or latents.shape[1] != channels or 0 in latents.shape:
        raise InputError(f"{path}: latents are {list(latents.shape)}, expected [B, {channels}, T, H, W]; {again}")
    used = {name: value for name, value in _latents_metadata(settings).items() if value is not None}
    check_recorded_settings(path, metadata, used, again)
    if fingerprints := settings.get("fingerprints"):  # this library wrote the settings, perhaps by a later `encode`
        now = deciding(settings, "encode", "denoise") | {"dtype": settings.get("dtype")}
        check_key(path, metadata, now, again, model=fingerprints)
    if len(latents) != len(settings["prompt"]):
        raise InputError(f"{path} holds {len(latents)} latents for {len(settings['prompt'])} prompts; {again}")
    return latents.transpose(0, 2, 3, 4, 1)


def read_settings(folder: Path) -> dict[str, Any]:
    """What `generation_config.json` says, under the names of the request: prompts and model at least.

    Returns:
        Fields of the request, `model_id`, `revision`, `transformer`, `variant`, `dtype`, `fingerprints`, `asked` (the
        fields that the user gave; the others were filled in), `arrays` and `noise_schedule`, as far as the file has
        them: the reference system writes fewer fields than we do.

    Raises:
        InputError: missing, damaged or incomplete.
    """
    path = folder / CONFIG_FILE
    try:
        raw = load_json(path)
    except OSError as e:
        raise InputError(f"{path} cannot be read ({e.strerror}); run `cogvideox encode` first") from e
    except ValueError as e:
        raise InputError(f"{path} is not JSON ({e}); run `cogvideox encode` again") from e
    if not isinstance(raw, dict):
        raise InputError(f"{path} must hold a JSON object; run `cogvideox encode` again")
    if not is_as_written(raw):
        log.warning("%s was edited or damaged after it was written; it is taken as it stands", path)
    kinds = {name: json_type(name) for name in ("prompt", *recorded("encode", "denoise", "decode"))}
    kinds |= {"prompt": list[str], "negative_prompt": list[str]}
    kinds |= {"model_id": str, "dtype": str, "revision": str | None, "transformer": str, "variant": str}
    kinds |= {"fingerprints": dict, "asked": list[str], "arrays": dict, "noise_schedule": dict}
    values = {name: raw[_THEIR_NAMES.get(name, name)] for name in kinds if _THEIR_NAMES.get(name, name) in raw}
    for name in ("prompt", "negative_prompt"):
        values[name] = [raw.get(name)] if isinstance(raw.get(name), str) else raw.get(name)
    values.setdefault("model_id", None)
    settings, wrong = {}, []
    for name, value in values.items():
        try:
            settings[name] = typed(kinds[name], value)
            json.dumps(settings[name], allow_nan=False)  # ValueError: NaN or infinity
        except ValueError:
            wrong.append(_THEIR_NAMES.get(name, name))
    if wrong:
        raise InputError(f"{path} has no usable {' and no '.join(wrong)}; run `cogvideox encode` again")
    settings |= {name: [Media.of(facts) for facts in settings[name]] for name in MEDIA if name in settings}
    check_prompts(settings["prompt"], settings["negative_prompt"])
    check_option("fps", settings.get("fps"))
    return settings


def asked_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of settings, what the user asked for: the options that were filled in are left out.

    Settings that do not say so, such as those of the reference system, are taken as they are.
    """
    if "asked" not in settings:
        return dict(settings)
    filled = {*recorded("encode", "denoise", "decode")} - {*settings["asked"], *MEDIA, "negative_prompt", "lora"}
    return {name: value for name, value in settings.items() if name not in filled}


def check_folder(folder: Path, nbytes: int = 0) -> None:
    """Refuse a run directory, there or not yet, that cannot be written to, or whose disk is too full for results."""
    check_writable(folder / CONFIG_FILE)
    check_free_space(folder, nbytes)


def space_needed(run: Run) -> int:
    """Bytes of the stage files and, generously, of the videos."""
    size, shapes = run.size, run.model.feature_shapes(run.batch).values()
    pixels = size.num_frames * size.height * size.width * 3
    return 2 * 4 * sum(math.prod(shape) for shape in shapes) + run.batch * run.request.num_videos * pixels


@contextmanager
def run_dir_lock(folder: Path, *, temporary: bool = False) -> Iterator[None]:
    """Make the run directory and keep other runs out of it while this one works there.

    temporary: our files are removed when all went well, and when nothing was finished.

    Raises:
        InputError: another run works there, or the directory cannot be written.
    """
    if not hosts.is_first():
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise InputError(f"cannot write to {folder}: {e.strerror}; choose another directory") from e
    busy = f"another run is at work in {folder}; wait for it or choose another --dir or --out"
    try:
        with file_lock(folder / LOCK_FILE, busy=busy):
            try:
                yield
            except BaseException:
                if kept := finished(folder):
                    log.warning("%s in %s: kept, the same command goes on from there", " and ".join(kept), folder)
                elif temporary:
                    remove_files(folder)
                raise
            if temporary:
                remove_files(folder)
    finally:
        if temporary:
            with suppress(OSError):  # not ours alone
                folder.rmdir()


def finished(folder: Path) -> list[str]:
    """The files in a run directory that a later run goes on from."""
    names = (EMBEDDINGS_FILE, STATE_FILE, LATENTS_FILE)
    return [
        str(path.relative_to(folder)) for at in _directories(folder) for name in names if (path := at / name).exists()
    ]


def _directories(folder: Path) -> list[Path]:
    return [folder, *sorted(path for path in folder.glob("seed-*") if path.is_dir())]


@hosts.on_process_0
def remove_files(folder: Path) -> None:
    """Remove what a run keeps in its directory; the files of others stay."""
    for at in reversed(_directories(folder)):
        remove_orphans(at)
        for name in (CONFIG_FILE, EMBEDDINGS_FILE, STATE_FILE, LATENTS_FILE):
            (at / name).unlink(missing_ok=True)
        if at != folder:
            with suppress(OSError):  # somebody else's files
                at.rmdir()


# --- stage files: safetensors that say in their metadata what they were made of


def one_or_all(prompts: list[str]) -> str | list[str]:
    """A single prompt is written as the reference system does, as a string."""
    return prompts[0] if len(prompts) == 1 else prompts


def _as_text(value: Any) -> str:
    """A metadata value: strings and numbers as they are, several prompts and records as JSON."""
    value = one_or_all(value) if isinstance(value, list) else value
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)


def check_recorded_settings(path: Path, metadata: dict[str, str], settings: dict[str, Any], again: str) -> None:
    """Compare what a file says it was made with and the run's settings, where both say something.

    Raises:
        InputError: they differ; with the differences, and `again`, what to do.
    """
    differ = [name for name, value in settings.items() if metadata.get(name, _as_text(value)) != _as_text(value)]
    if differ:
        found = ", ".join(f"{name} {metadata[name]!r} is now {_as_text(settings[name])!r}" for name in differ)
        raise InputError(f"{path} was made with other settings than this run's ({found}); {again}")


def check_key(
    path: Path, metadata: dict[str, str], settings: dict[str, Any], again: str, model: dict[str, str] | None = None
) -> None:
    """Compare all that this library says a file was made of, and the run's; files of other systems say less.

    settings: JSON values; None stands for none.
    model: part of the checkpoint -> its fingerprint.

    Raises:
        InputError: they differ; with what, and `again`.
    """
    try:
        made = json.loads(metadata.get("settings", "null"))
    except ValueError:
        return  # written by another system
    if not isinstance(made, dict) or not isinstance(made.get("model"), dict):
        return  # the same
    differ = [name for name, value in settings.items() if made.get(name) != value]
    differ += [f"the {name}" for name, part in made["model"].items() if model is not None and model.get(name) != part]
    if differ:
        raise InputError(f"{path} was made before {' and '.join(differ)} changed; {again}")


@hosts.on_process_0
def write_stage(path: Path, tensors: dict[str, Float[np.ndarray, "*shape"]], metadata: dict[str, Any]) -> None:
    """Write a stage file as the reference system does: bfloat16 as float32, its name kept in the metadata."""
    kinds = json.dumps({name: str(value.dtype) for name, value in tensors.items()})
    texts = {name: _as_text(value) for name, value in metadata.items()}
    whole = {name: value.astype(np.float32) for name, value in tensors.items()}
    write_tensors(path, whole, {"dtype_info": kinds, **texts})


@hosts.broadcast_result
def is_fresh(path: Path, key: str) -> bool:
    """Whether a stage file is there, whole, and made from these settings, which are JSON."""
    if not path.exists():
        return False
    try:
        with TensorFile(path) as file:
            file.check(required=True)
            same = json.loads(file.metadata.get("settings", "null")) == json.loads(key)
    except (CheckpointError, ValueError) as e:
        log.warning("making %s again: %s", path.name, e)
        return False
    log.info("reusing %s" if same else "making %s again: it is of other settings", path)
    return same


@hosts.broadcast_result
def read_stage(
    path: Path, names: tuple[str, ...] | None, maker: str
) -> tuple[dict[str, Float32[np.ndarray, "*shape"]], dict[str, str]]:
    """Tensors and metadata of a stage file; `maker` is the command that makes it, `names` None are all tensors.

    Raises:
        InputError: the file is missing, damaged, or holds NaN or infinity.
    """
    if not path.exists():
        raise InputError(f"{path} is missing; run `{maker}` first")
    try:
        with TensorFile(path) as file:
            file.check()
            names = tuple(file.tensors) if names is None else names
            if missing := [name for name in names if name not in file.tensors]:
                raise InputError(f"{path} holds no {' and no '.join(missing)}; run `{maker}` again")
            tensors = {name: file.read(name).astype(np.float32) for name in names}
            metadata = file.metadata
    except CheckpointError as e:
        raise InputError(f"{e} Or run `{maker}` again.") from e
    if bad := [name for name, value in tensors.items() if not np.isfinite(value).all()]:
        raise InputError(f"{path} holds NaN or infinity in {' and '.join(bad)}; run `{maker}` again")
    return tensors, metadata
