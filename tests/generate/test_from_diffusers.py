"""What people who know diffusers give and expect: tensors of PyTorch, its schedulers, callbacks, and whole scripts."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import sys

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.utils import export_to_video
from diffusers.video_processor import VideoProcessor
from flax import nnx
from PIL import Image

from cogvideox_flax import RELEASES, GenerationRequest, Pipeline
from cogvideox_flax.checkpoint import Manifest, load_text_encoder, load_transformer, load_vae
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.resolve import resolve
from cogvideox_flax.generate.result import items
from cogvideox_flax.io.video import read_video, save_video
from cogvideox_flax.lora import add_lora, save_lora
from cogvideox_flax.models.cogvideox.model import CogVideoX
from cogvideox_flax.nn.component import METHODS
from tests.support import processes
from tests.support.commands import ROOT
from tests.support.media import smooth
from tests.support.released_layout import build, randomise, save_layout

PROMPT = "a red circle moves up"
QUICK = {"num_inference_steps": 2, "progress": False}

TENSORS = {
    "float32 with gradients": lambda x: x.requires_grad_(),
    "bfloat16 with gradients": lambda x: x.bfloat16().requires_grad_(),
    "float16, not contiguous": lambda x: x.half().movedim(0, -1).contiguous().movedim(-1, 0),
}
"""Forms of a float32 tensor."""


@pytest.fixture(scope="module")
def pipe():
    return Pipeline.from_pretrained()


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def rounded(tensor):
    """The numbers that a tensor holds."""
    return tensor.detach().float().numpy()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dtypes_of_torch_are_dtypes(dtype):
    pipe = Pipeline.from_pretrained(dtype=dtype)
    assert pipe.dtype == str(dtype).removeprefix("torch.")
    found = load_transformer(pipe.native_dir, dtype=dtype)
    assert found.proj_out.kernel.dtype == jnp.dtype(pipe.dtype)
    with pytest.raises(InputError, match="unknown dtype 'int8'"):
        Pipeline.from_pretrained(dtype=torch.int8)


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[pytest.mark.further] * (i > 0)) for i, form in enumerate(TENSORS)]
)
def test_tensors_of_torch_are_arrays(pipe, form):
    """Wherever arrays are taken."""
    text = pipe.encode(PROMPT, progress=False)
    embeds, negative = (torch.tensor(np.asarray(half["prompt_embeds"])) for half in (text.text, text.negative_text))
    latents, clip = noise(1, 5, 8, 8, 16), noise(1, 5, 64, 64, 3)
    given = {"prompt_embeds": embeds, "negative_prompt_embeds": negative, "latents": latents}
    given = {name: TENSORS[form](x) for name, x in given.items()}
    found = pipe(**given, output_type="latent", **QUICK).frames
    arrays = {name: rounded(x) for name, x in given.items()}
    np.testing.assert_array_equal(found, pipe(**arrays, output_type="latent", **QUICK).frames)
    latents, embeds, clip = given["latents"], given["prompt_embeds"], TENSORS[form](clip)
    found = pipe.decode(latents, progress=False)
    np.testing.assert_array_equal(found, pipe.decode(rounded(latents), progress=False))
    transformer, vae = load_transformer(pipe.native_dir), load_vae(pipe.native_dir)

    def results(transformer, vae, latents, embeds, timestep, clip):
        v = transformer(latents, context=embeds, timestep=timestep)
        return v, vae.encode(clip)[0], vae.decode(latents[:, :1])

    inputs = latents, embeds, torch.tensor([500]), clip[:, :1]
    found, expected = (
        jax.jit(lambda *parts, given=given: results(*parts, *given))(transformer, vae)
        for given in (inputs, [rounded(x) for x in inputs])
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_token_ids_of_torch_are_arrays(pipe):
    ids = np.asarray(pipe.tokenizer([PROMPT]))
    encoder = load_text_encoder(pipe.native_dir)
    np.testing.assert_array_equal(encoder(torch.tensor(ids)), encoder(ids))


@pytest.mark.parametrize("release", RELEASES)
def test_the_parts_of_every_family_take_tensors(release):
    manifest = Manifest.of_release(RELEASES[release])
    for name in manifest.model.components:
        kind = type(manifest.abstract(name))
        found = [getattr(kind, method, None) for method in ("__call__", "embed", "encode", "decode")]
        methods = [method for method in found if inspect.isfunction(method)]
        assert methods and all(hasattr(method, "__wrapped__") for method in methods), name


@pytest.mark.parametrize(
    "tensor", [torch.tensor, lambda x: list(torch.tensor(x)), list], ids=["clip", "frames", "numpy"]
)
def test_frames_of_torch_and_lists_of_them_are_clips(pipe, tensor):
    clip, how = smooth(0, 17, 64, 64), {"output_type": "latent", **QUICK}
    expected = pipe(PROMPT, video=clip, **how).frames
    np.testing.assert_array_equal(pipe(PROMPT, video=tensor(clip), **how).frames, expected)


def test_images_of_torch_are_images():
    pipe, image, how = Pipeline.from_pretrained("embedded-image-to-video"), smooth(0, 64, 64), {"output_type": "latent"}
    expected = pipe(PROMPT, image=image, **how, **QUICK).frames
    np.testing.assert_array_equal(pipe(PROMPT, image=torch.tensor(image), **how, **QUICK).frames, expected)


def test_arrays_with_the_channels_elsewhere_are_told_where(pipe):
    for shape, axis in (((1, 5, 16, 8, 8), -3), ((1, 16, 5, 8, 8), -4)):
        latents = noise(*shape)
        advice = f"Channels come last here: move axis {axis} to the end"
        with pytest.raises(InputError, match=advice):
            pipe(PROMPT, latents=latents, **QUICK)
        with pytest.raises(InputError, match=advice):
            pipe.decode(latents)
        assert latents.movedim(axis, -1).shape == np.moveaxis(latents.numpy(), axis, -1).shape == (1, 5, 8, 8, 16)
    with pytest.raises(
        InputError, match=r"float32 \[17, 3, 64, 64\]. Channels come last here: move axis -3 .* Of floats in"
    ):
        pipe(PROMPT, video=noise(17, 3, 64, 64), **QUICK)
    with pytest.raises(InputError, match=r"latents is .*; expected an array of numbers"):
        pipe(PROMPT, latents=noise(1, 5, 8, 8, 16).to("meta"), **QUICK)


def test_output_type_pt_is_answered_with_what_makes_it(pipe):
    for request in ({"prompt": PROMPT, "output_type": "pt"}, {"prompt": GenerationRequest(PROMPT, output_type="pt")}):
        with pytest.raises(InputError, match=r"take 'float', of which (.*) is that tensor") as answer:
            pipe(**request, progress=False)
    code = str(answer.value).split("of which ")[1].removesuffix(" is that tensor")
    clip, processor = noise(1, 3, 17, 64, 64), VideoProcessor()
    frames, tensor = (processor.postprocess_video(clip, output_type=kind) for kind in ("np", "pt"))
    video = type("Result", (), {"frames": frames})
    assert torch.equal(eval(code, {"torch": torch, "video": video}), tensor)


def test_torch_is_never_imported():
    code = f"""
import sys
from cogvideox_flax import Pipeline
Pipeline.from_pretrained()({PROMPT!r}, num_inference_steps=1, progress=False)
print("torch" in sys.modules)
"""
    done = processes.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


RELEASED = {
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "prediction_type": "v_prediction",
    "timestep_spacing": "trailing",
    "rescale_betas_zero_snr": True,
}
"""The noise schedule of 5b."""


@pytest.mark.parametrize(
    ("cls", "name", "options"),
    [
        ("CogVideoXDDIMScheduler", "ddim", {"snr_shift_scale": 1.0}),
        ("CogVideoXDPMScheduler", "dpm", {"snr_shift_scale": 1.0}),
        ("DDIMScheduler", "ddim", {"clip_sample": False}),
        ("DPMSolverMultistepScheduler", "dpmpp_2m", {}),
        ("UniPCMultistepScheduler", "uni_pc", {}),
        ("EulerDiscreteScheduler", "euler", {}),
        ("EulerAncestralDiscreteScheduler", "euler_ancestral", {}),
    ],
)
def test_schedulers_of_diffusers_are_ours_of_the_same_steps(pipe, cls, name, options):
    """tests/models/test_solvers.py compares the steps with diffusers'."""
    manifest = Manifest.of_release(RELEASES["cogvideox-5b"])
    ours, *others = (
        resolve(GenerationRequest(PROMPT, scheduler=scheduler), manifest)
        for scheduler in (name, cls, getattr(diffusers, cls)(**RELEASED, **options))
    )
    for run in others:
        assert run.scheduler == ours.scheduler
        assert pipe.recipe(run) == pipe.recipe(ours)
    mine = Pipeline.from_pretrained()
    mine.scheduler = cls
    assert mine.scheduler is pipe.resolve(GenerationRequest(PROMPT, scheduler=name)).scheduler


def test_schedulers_of_diffusers_keep_their_noise_schedule(pipe):
    given = diffusers.CogVideoXDDIMScheduler(**RELEASED | {"rescale_betas_zero_snr": False}, snr_shift_scale=2.0)
    config = pipe.resolve(GenerationRequest(PROMPT, scheduler=given)).scheduler.config
    assert (config.snr_shift_scale, config.rescale_betas_zero_snr) == (2.0, False)


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (diffusers.CogVideoXDDIMScheduler(), "prediction_type: got 'epsilon', supported is 'v_prediction'"),
        (diffusers.DDIMScheduler(**RELEASED), "clip_sample: got True, supported is False"),
        (
            diffusers.PNDMScheduler(),
            "names PNDMScheduler, which has no counterpart here; expected one of CogVideoXDDIM",
        ),
        (
            diffusers.FlowMatchEulerDiscreteScheduler(),
            "names FlowMatchEulerDiscreteScheduler, which has no counterpart",
        ),
        ("FlowMatchEulerDiscreteScheduler", "known are ddim, .*, and diffusers' CogVideoXDDIMScheduler, "),
        ("PNDMScheduler", "unknown scheduler 'PNDMScheduler'; known are ddim, "),
        (
            diffusers.DDIMScheduler,
            "scheduler is <class .*; expected one of ddim, .* or a scheduler object of cogvideox",
        ),
        (3, "scheduler is 3; expected one of ddim, "),
    ],
)
def test_other_schedulers_are_refused(pipe, scheduler, message):
    with pytest.raises(InputError, match=message):
        pipe(PROMPT, scheduler=scheduler, **QUICK)
    with pytest.raises(InputError, match=message):
        Pipeline.from_pretrained().scheduler = scheduler


@pytest.mark.parametrize(
    ("cls", "name", "options"),
    [
        ("FlowMatchEulerDiscreteScheduler", "flow_match", {"shift": 5.0}),
        ("DPMSolverMultistepScheduler", "dpmpp_2m", {"flow_shift": 5.0}),
        ("UniPCMultistepScheduler", "uni_pc", {"flow_shift": 5.0}),
    ],
)
def test_schedulers_of_diffusers_on_a_flow(cls, name, options):
    model = Manifest.of_release(RELEASES["hunyuanvideo1.5-480p-t2v"]).model
    assert model.own_scheduler(cls) == name
    of_flow = {} if "shift" in options else {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
    assert model.own_scheduler(getattr(diffusers, cls)(**of_flow, **options)) == model.scheduler(name)
    with pytest.raises(InputError, match="unknown scheduler 'DDIMScheduler'; known are flow_match"):
        model.scheduler("DDIMScheduler")


def test_prompt_embeds_alone_go_with_the_negative_prompt(pipe):
    (embeds,) = pipe.encode(PROMPT, negative=False, progress=False).text.values()
    for negative in ({}, {"negative_prompt": "a blue square"}, {"negative_prompt": None}):
        expected = pipe(PROMPT, output_type="latent", **negative, **QUICK).frames
        found = pipe(prompt_embeds=embeds, output_type="latent", **negative, **QUICK).frames
        np.testing.assert_array_equal(found, expected)


def test_a_callback_returns_latents_to_go_on_with(pipe):
    """As a request whose loop the caller owns; also the last step's, and those of several seeds."""
    request = GenerationRequest(PROMPT, num_inference_steps=3, scheduler="dpm", output_type="latent", num_videos=2)
    expected = []
    for run in pipe.resolve(request).seeds():
        loop = pipe.denoise(pipe.encode(run, progress=False), run)
        for state in loop:
            if int(state.step) != 2:
                state = loop.send(dataclasses.replace(state, latents=state.latents * 0.5))
        expected.append(np.asarray(state.latents))
    expected = np.concatenate(expected)
    for form in (lambda x: 0.5 * x, lambda x: {"latents": torch.tensor(np.asarray(x)) * 0.5}):
        seen = []

        def callback(step, timestep, latents, form=form, seen=seen):
            seen.append(step)
            return form(latents) if step != 1 else {}

        video = pipe(request, callback=callback, progress=False)
        np.testing.assert_array_equal(video.frames, expected)
        assert seen == [0, 1, 2] * 2 and set(video.metadata["settings"]["arrays"]) == {"callback"}
    assert (pipe(request, progress=False).frames != expected).any()


def test_what_a_callback_cannot_change_is_refused(pipe):
    for answer, message in (
        ({"prompt_embeds": 1}, "the callback returns prompt_embeds; it can change the latents alone"),
        (
            np.zeros((1, 5, 16, 8, 8)),
            r"returns latents \[1, 5, 16, 8, 8\]; expected \[1, 5, 8, 8, 16\]. Channels come last",
        ),
        (np.array(["x"]), "latents of the callback is .*; expected an array of numbers"),
    ):
        with pytest.raises(InputError, match=message):
            pipe(PROMPT, callback=lambda *_, answer=answer: answer, **QUICK)
    with pytest.raises(
        TypeError, match=r"callback_on_step_end is .*; here: callback=f, .* may return latents to go on"
    ):
        pipe(PROMPT, callback_on_step_end=print)


def test_a_seed_for_each_video(pipe):
    prompts = [PROMPT, "a blue square moves down"]
    how = {"scheduler": "dpm", "output_type": "latent", **QUICK}
    options = {"negative_prompt": ["", "green"], **how}
    found = pipe(prompts, seed=[7, 3], **options)
    alone = [pipe(prompts[i], options["negative_prompt"][i], seed=seed, **how) for i, seed in ((0, 7), (1, 3))]
    np.testing.assert_array_equal(found.frames, np.concatenate([one.frames for one in alone]))
    assert (found.metadata["seed"], found.metadata["prompt"]) == ([7, 3], prompts)
    assert items(found)[1].metadata == alone[1].metadata
    of_one = pipe(PROMPT, seed=torch.tensor([7, 3]), **how)
    assert (of_one.frames[0] == found.frames[0]).all() and of_one.metadata["seed"] == [7, 3]
    four = pipe(prompts, seed=(1, 7, 3, 2), num_videos=2, **options)
    assert (four.frames[1:3] == found.frames).all()
    assert four.metadata["prompt"] == [prompts[0]] * 2 + [prompts[1]] * 2


def test_a_seed_for_each_video_splits_what_is_given_for_each(pipe):
    clips, latents = [smooth(i, 17, 64, 64) for i in (0, 1)], noise(2, 5, 8, 8, 16)
    steps = noise(2, 2, 5, 8, 8, 16)
    options = {"scheduler": "dpm", "strength": 1.0, "output_type": "latent", **QUICK}
    found = pipe([PROMPT] * 2, video=clips, seed=[7, 3], latents=latents, noise=steps, **options).frames
    second = pipe(PROMPT, video=clips[1], seed=3, latents=latents[1:], noise=steps[:, 1:], **options).frames
    np.testing.assert_array_equal(found[1:], second)


def test_seeds_that_do_not_go_with_the_videos_are_refused(pipe):
    with pytest.raises(InputError, match="seed holds 3 seeds for 2 videos"):
        pipe([PROMPT] * 2, seed=[1, 2, 3], **QUICK)
    for seed in ([], [1, -2], ["x"], [True]):
        with pytest.raises(InputError, match=r"seed is .*; expected a whole number"):
            pipe(PROMPT, seed=seed, **QUICK)


def test_videos_per_prompt_stand_side_by_side(pipe):
    prompts = [PROMPT, "a blue square moves down"]
    how = {"output_type": "latent", **QUICK}
    ours, theirs = (pipe(prompts, **{name: 2}, **how) for name in ("num_videos", "num_videos_per_prompt"))
    np.testing.assert_array_equal(theirs.frames, ours.frames[[0, 2, 1, 3]])
    assert theirs.metadata["prompt"] == [prompts[0]] * 2 + [prompts[1]] * 2
    assert theirs.metadata["seed"] == [0, 1, 0, 1]
    np.testing.assert_array_equal(pipe(PROMPT, num_videos_per_prompt=1, **how).frames, pipe(PROMPT, **how).frames)
    with pytest.raises(TypeError, match="are the same; give one of them"):
        pipe(PROMPT, num_videos=2, num_videos_per_prompt=2)


SCRIPTS = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "diffusers.md").read_text(), re.DOTALL)
SMALL = {"480": "32", "720": "48", "num_frames=49": "num_frames=9", "[:49]": "[:9]", "steps=50": "steps=3"}
"""What of a script is of released checkpoints -> of the small one."""


PARTS = {
    "_class_name": "CogVideoXPipeline",
    "scheduler": ["diffusers", "CogVideoXDDIMScheduler"],
    "text_encoder": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "T5Tokenizer"],
    "transformer": ["diffusers", "CogVideoXTransformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLCogVideoX"],
}
"""model_index.json."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the scripts run: two checkpoints, two adapters, an image and a clip."""
    folder = tmp_path_factory.mktemp("scripts")
    for name in ("CogVideoX-5b", "CogVideoX-5b-I2V"):
        vae = randomise(build("vae", name.lower(), small=True, sample_height=96, sample_width=160))  # tiles add up
        save_layout(folder / name, name.lower(), vae=vae, text_length=226)
        (folder / name / "model_index.json").write_text(json.dumps(PARTS))
    transformer = Pipeline.from_pretrained(folder / "CogVideoX-5b", progress=False).transformer
    for seed, name in enumerate(("style", "motion")):
        adapted = add_lora(CogVideoX, transformer, 2, rngs=nnx.Rngs(seed))
        b = adapted.blocks.attn.q.b
        adapted.blocks.attn.q.b = nnx.Param(jax.random.normal(jax.random.key(seed), b.shape))
        save_lora(CogVideoX, folder / "adapters" / name, adapted)
    frames = smooth(0, 12, 32, 48)
    Image.fromarray(frames[0]).save(folder / "beach.png")
    save_video(folder / "horse.mp4", frames, 8)
    return folder


def run_script(diff, drop, folder, monkeypatch):
    """Run a side of a diff, the one without lines that begin with `drop`; returns its names."""
    code = "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith(drop))
    for released, small in ({"zai-org/": f"{folder}/"} | SMALL).items():
        code = code.replace(released, small)
    for path in folder.glob("*.mp4"):
        if path.name != "horse.mp4":
            path.unlink()
    monkeypatch.chdir(folder)
    names = {"__name__": "script"}
    exec(compile(code, "script.py", "exec"), names)
    return names


@pytest.mark.parametrize("diff", SCRIPTS, ids=["text", "image", "video"])
def test_scripts_of_diffusers_ported(diff, folder, monkeypatch):
    """Both sides run, and write as many videos of the same size and length."""
    assert len(SCRIPTS) == 3 and 25 <= sum(not line.startswith("+") for line in diff.splitlines()) <= 45
    monkeypatch.setattr(diffusers.DiffusionPipeline, "enable_model_cpu_offload", lambda pipe: None)  # there is no GPU
    written = []
    for drop in ("+", "-"):
        names = run_script(diff, drop, folder, monkeypatch)
        made = {path.name: read_video(path)[0] for path in folder.glob("*.mp4") if path.name != "horse.mp4"}
        written.append(made)
        if drop == "-":
            active = [(record["file"].split("/")[-2], record["scale"]) for record in names["pipe"].loras]
    theirs, ours = written
    assert len(theirs) >= 1 and {name: x.shape for name, x in theirs.items()} == {
        name: x.shape for name, x in ours.items()
    }
    assert {name for name, _ in active} <= {"style", "motion"} and active[0][0] == "style"


@pytest.mark.parametrize(
    "line", ["pipe.vae.enable_slicing()", "pipe.vae.enable_tiling()", "pipe.transformer.to('cuda')"]
)
def test_methods_of_parts_are_answered(pipe, line):
    with pytest.raises(AttributeError, match=r"; diffusers' .* is here: "):
        eval(line, {"pipe": pipe})
    for part in (pipe.vae, pipe.transformer):
        assert not any(hasattr(part, name) for name in METHODS)
        with pytest.raises(AttributeError, match=r"has no attribute 'other'$"):
            _ = part.other


def test_export_to_video_inverts_uint8(pipe, tmp_path):
    """As the page says."""
    video = pipe(PROMPT, **QUICK).frames[0]
    export_to_video(list(video), str(tmp_path / "x.mp4"), fps=8)
    found = read_video(tmp_path / "x.mp4")[0].astype(int)
    assert np.abs(found - (256 - video.astype(int)) % 256).mean() < 10 < np.abs(found - video).mean()
