"""ComfyUI's nodes in a stand-in for ComfyUI: what they give is what the library gives, bit for bit."""

import copy
import json
import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLCogVideoX
from PIL import Image

from cogvideox_flax import InputError, Pipeline, __version__
from cogvideox_flax.generate.request import GenerationRequest, options_of
from cogvideox_flax.generate.upscale import UpscaleOptions, upscale
from cogvideox_flax.io.video import save_video
from cogvideox_flax.models.registry import FAMILIES
from tests.support import processes
from tests.support.comfy_host import WIDGETS, Host, InterruptProcessingException
from tests.support.media import smooth
from tests.support.reference import make_transformer
from tests.support.released_layout import save_layout

ROOT = Path(__file__).resolve().parents[2]
APP = ROOT / "apps" / "comfyui"
WORKFLOWS = APP / "example_workflows"

PROMPT = "a large yellow circle goes up against a black background"


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    folder = tmp_path_factory.mktemp("comfyui")
    for name in ("models/diffusers", "models/loras", "input", "output"):
        (folder / name).mkdir(parents=True)
    Image.fromarray(smooth(5, 64, 64)).save(folder / "input" / "first_frame.png")
    save_video(folder / "input" / "poses.mp4", smooth(6, 9, 32, 48), 8)
    models = folder / "models" / "diffusers"
    save_layout(models / "control", "cogvideox-5b", transformer=make_transformer("cogvideox-5b", in_channels=32))
    save_layout(models / "text", "cogvideox-2b")
    host = Host(folder, APP)
    yield host
    host.close()


@pytest.fixture(scope="module")
def pipe():
    return Pipeline.from_pretrained()


def workflow(name, **changes):
    """An example in the API's form. changes: node_input=value."""
    made = json.loads((WORKFLOWS / "api" / f"{name}.json").read_text())
    for key, value in changes.items():
        node, _, name = key.removeprefix("n").partition("_")
        made[node]["inputs"][name] = value
    return made


def as_uint8(images):
    """As ComfyUI writes them: rounded down."""
    assert images.dtype == torch.float32 and images.device.type == "cpu"
    return (images * 255).clamp(0, 255).byte().numpy()


def run_node(host, class_type, *sockets, **inputs):
    """A node by itself, with the objects that its sockets get."""
    return host.nodes[class_type].execute(*sockets, **inputs).args


# --- what is there ---


@pytest.mark.parametrize("name", ["text_to_video", "image_to_video", "control"])
def test_the_two_forms_of_an_example_say_the_same(host, name):
    assert host.api_form(json.loads((WORKFLOWS / f"{name}.json").read_text())) == workflow(name)


def test_schedulers_are_those_of_all_models(host):
    names = {scheduler for family in FAMILIES.values() for scheduler in family.schedulers}
    for node in ("CogVideoXFlaxSampler", "CogVideoXFlaxGenerate"):
        (combo,) = [each for each in host.schema(node).inputs if each.id == "scheduler"]
        assert set(combo.how["options"]) == {"default", *names} and len(combo.how["options"]) == len(names) + 1


def test_every_option_of_a_run_has_a_place(host):
    """A new option of the library is a new widget."""
    nodes = sys.modules["comfy_custom_node.nodes"]
    named = {*nodes.WIDGETS.values(), *(option for option, _ in nodes.IMAGES.values()), *nodes.OTHERS}
    others = {each.id for each in host.schema("CogVideoXFlaxOptions").inputs}
    assert others | named == set(options_of(GenerationRequest)) and not others & named


def test_defaults_of_widgets_are_the_defaults_of_options(host):
    for node in ("CogVideoXFlaxOptions", "CogVideoXFlaxUpscale"):
        inputs = {each.id: each.how["default"] for each in host.schema(node).inputs if "default" in each.how}
        kind = UpscaleOptions if "Upscale" in node else GenerationRequest
        given = sys.modules["comfy_custom_node.nodes"].values_of(kind, inputs)
        for name, value in given.items():
            assert value == kind.__dataclass_fields__[name].default, name


def test_the_page_names_every_node_and_socket(host):
    page = (ROOT / "docs" / "serving.md").read_text()
    rows = dict(re.findall(r"^\| (CogVideoX Flax [^|]+?) \| (.+) \|$", page, flags=re.M))
    schemas = {schema.display_name: schema for schema in map(host.schema, host.nodes) if schema.display_name}
    assert rows.keys() == schemas.keys()
    for name in ("CogVideoX Flax Sampler", "CogVideoX Flax Decode", "CogVideoX Flax Upscale"):
        sockets = [each.id for each in schemas[name].inputs if each.type not in WIDGETS]
        assert re.findall(r"`(\w+)`", rows[name]) == [*sockets, *(each.display_name for each in schemas[name].outputs)]


def test_the_package_is_as_the_registry_takes_it():
    """Its name has no "ComfyUI" in it; the version is the library's."""
    project = tomllib.loads((APP / "pyproject.toml").read_text())["project"]
    assert re.fullmatch(r"[a-z][a-z0-9-]{,99}", project["name"]) and "comfyui" not in project["name"]
    assert project["version"] == __version__ and project["dependencies"] == ["cogvideox-flax"]


def test_listing_the_nodes_imports_neither_jax_nor_torch(tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import types, asyncio
class Anything:
    def __getattr__(self, name): return Anything()
    def __call__(self, *args, **how): return Anything()
    def __iter__(self): return iter(())
io = types.SimpleNamespace(ComfyNode=object, Custom=Anything(), Schema=Anything())
types_of_inputs = "Boolean Int Float String Combo Image Mask Latent Video".split()
io.__dict__.update(dict.fromkeys(types_of_inputs, Anything()))
latest = types.ModuleType("comfy_api.latest")
latest.__dict__.update(io=io, ComfyExtension=object, InputImpl=None, Types=None)
sys.modules |= {{"comfy_api": types.ModuleType("comfy_api"), "comfy_api.latest": latest, "folder_paths": Anything()}}
import apps.comfyui
assert not any(name.startswith("cogvideox_flax") for name in sys.modules)
for node in asyncio.run(asyncio.run(apps.comfyui.comfy_entrypoint()).get_node_list()):
    node.define_schema()
assert not {{"jax", "torch"}} & set(sys.modules)
"""
    run = processes.run([sys.executable, "-c", code], cwd=tmp_path)
    assert run.returncode == 0, run.stderr


# --- runs ---


@pytest.fixture(scope="module")
def expected(pipe):
    return pipe(PROMPT, seed=7, num_inference_steps=8, progress=False)


def test_text_to_video_is_the_library_s(host, pipe, expected):
    results = host.run(workflow("text_to_video"))
    images, video = results["5"]
    assert np.array_equal(as_uint8(images), expected.frames[0])
    assert np.array_equal(video.frames(), expected.frames[0]) and video.get_components().frame_rate == expected.fps
    assert [(value, total) for value, total, _ in host.progress] == [(step, 8) for step in range(1, 9)]
    previews = [preview for *_, preview in host.progress if preview is not None]
    assert len(previews) >= 7 and all(kind == "JPEG" and image.size == (64, 64) for kind, image, _ in previews)
    assert host.unloaded == ["2", "3", "4", "5"]
    last = np.asarray(previews[-1][1], np.float32)
    assert np.abs(last - expected.frames[0][8]).mean() < 30  # what the preview's map from latents can show


def test_latents_of_other_nodes_are_decoded(host, pipe, expected):
    """Without what this library keeps beside them, and where another node has changed the tensor."""
    results = host.run(workflow("text_to_video"))
    model, samples = results["1"][0], results["4"][0]
    images, video = run_node(host, "CogVideoXFlaxDecode", model, {"samples": samples["samples"]})
    assert np.abs(as_uint8(images).astype(int) - expected.frames[0]).max() <= 1
    assert video.get_components().frame_rate == expected.fps
    changed = samples | {"samples": samples["samples"].flip(-1)}
    flipped, _ = run_node(host, "CogVideoXFlaxDecode", model, changed)
    other, _ = run_node(host, "CogVideoXFlaxDecode", model, {"samples": samples["samples"].flip(-1)})
    assert torch.equal(flipped, other) and not torch.equal(flipped, images)
    with pytest.raises(InputError, match="latents must be"):
        run_node(host, "CogVideoXFlaxDecode", model, {"samples": torch.zeros(1, 4, 8, 8)})


def test_a_second_run_does_again_what_changed(host, pipe):
    host.run(workflow("text_to_video"))
    host.run(workflow("text_to_video"))
    assert host.executed == []
    results = host.run(workflow("text_to_video", n4_seed=8))
    assert host.executed == ["4", "5", "6"]
    again = pipe(PROMPT, seed=8, num_inference_steps=8, progress=False)
    assert np.array_equal(as_uint8(results["5"][0]), again.frames[0])


@pytest.mark.parametrize("node", ["sampler", "generate"])
def test_an_interrupted_run_stops_within_a_step_and_the_next_one_is_right(host, pipe, node):
    made, sampler, decoder = workflow("text_to_video", n4_seed=11), "4", "5"
    if node == "generate":
        made, sampler, decoder = workflow("image_to_video", n1_model="embedded", n3_prompt=PROMPT, n3_seed=11), "3", "3"
        del made["3"]["inputs"]["start_image"]

    def interrupt(value):
        host.interrupted = value == 3

    host.on_progress = interrupt
    try:
        with pytest.raises(InterruptProcessingException):
            host.run(made)
    finally:
        host.on_progress = lambda value: None
    assert [value for value, *_ in host.progress] == [1, 2, 3] and sampler not in host.executed
    library = pipe(PROMPT, seed=11, num_inference_steps=8, progress=False)
    assert np.array_equal(as_uint8(host.run(made)[decoder][0]), library.frames[0])


def test_image_to_video_in_one_node_and_in_several(host):
    one = workflow("image_to_video")
    several = workflow("text_to_video", n1_model="embedded-image-to-video", n4_seed=3, n4_start_image=["7", 0])
    several["2"]["inputs"]["prompt"] = one["3"]["inputs"]["prompt"]
    several["7"] = one["2"]
    results = host.run(one)
    image = np.asarray(Image.open(host.folder / "input" / "first_frame.png"))
    options = {"image": image, "num_inference_steps": 8, "seed": 3, "progress": False}
    expected = results["1"][0].pipe(one["3"]["inputs"]["prompt"], **options)
    assert np.array_equal(as_uint8(results["3"][0]), expected.frames[0])
    assert len(host.progress) == 8 and host.progress[-1][2] is not None
    assert np.array_equal(as_uint8(host.run(several)["5"][0]), expected.frames[0])


def test_control(host):
    """A model of models/diffusers, and options."""
    made = workflow("control", n1_model="control", n1_path_or_hub_id="", n7_width=48, n7_height=32, n7_steps=2)
    made["7"]["inputs"] |= {"num_frames": 9, "scheduler": "ddim", "cfg": 3.0, "seed": 5}
    made["6"]["inputs"] |= {"guidance_interval": "0,0.6", "num_videos": 2, "fps": 12}
    results = host.run(made)
    folder = host.folder / "models" / "diffusers" / "control"
    expected = results["1"][0].pipe(
        "A dancer on a stage",
        control_video=host.folder / "input" / "poses.mp4",
        width=48,
        height=32,
        num_frames=9,
        num_inference_steps=2,
        scheduler="ddim",
        guidance_scale=3.0,
        seed=5,
        guidance_interval=(0, 0.6),
        num_videos=2,
        fps=12,
        progress=False,
    )
    images, video = results["8"]
    assert np.array_equal(as_uint8(images), np.concatenate(expected.frames))
    assert video.get_components().frame_rate == 12 and expected.frames.std() > 5
    assert [value for value, *_ in host.progress] == [1, 2, 1, 2]
    # the latents are those that diffusers' autoencoder takes, whose scaling factor is 0.7 here
    samples = results["7"][0]["samples"]
    assert samples.shape == (2, 16, 3, 4, 6)
    with torch.inference_mode():
        theirs = AutoencoderKLCogVideoX.from_pretrained(folder, subfolder="vae").decode(samples).sample
    theirs = (theirs / 2 + 0.5).clamp(0, 1).movedim(1, -1).flatten(0, 1)
    assert (theirs - images).abs().max() < 0.5 / 255 + 1e-3


def test_video_to_video(host, pipe, expected):
    """A clip as it comes from another node, and the share of the steps."""
    clip = torch.from_numpy(expected.frames[0].copy()) / 255
    model = host.run({"1": workflow("text_to_video")["1"]})["1"][0]
    how = {"video": clip, "denoise_strength": 0.5, "steps": 4, "seed": 2}
    images, _ = run_node(host, "CogVideoXFlaxGenerate", model, "a red circle", "", **how)
    library = pipe(
        "a red circle", video=expected.frames[0], strength=0.5, num_inference_steps=4, seed=2, progress=False
    )
    assert np.array_equal(as_uint8(images), library.frames[0])
    assert [value for value, *_ in host.progress[-2:]] == [1, 2]


def test_images_and_masks_become_what_the_library_takes(host):
    nodes, clip = sys.modules["comfy_custom_node.nodes"], smooth(8, 9, 32, 48)
    images, mask = torch.from_numpy(clip) / 255, torch.zeros(9, 32, 48)
    mask[:, :, 24:] = 1
    sockets = {"start_image": images, "end_image": images[-1:], "video": images, "mask": mask, "control_video": images}
    request = nodes.request_of(nodes.Model(None), "a", "b", sockets)
    assert np.array_equal(request.image, clip[0]) and np.array_equal(request.last_image, clip[-1])
    assert np.array_equal(request.video, clip) and np.array_equal(request.control_video, clip)
    white = np.zeros((9, 32, 48, 3), np.uint8)
    white[:, :, 24:] = 255
    assert request.mask_video.dtype == np.uint8 and np.array_equal(request.mask_video, white)
    one = nodes.request_of(nodes.Model(None), "a", "b", {"mask": mask[:1]})
    assert np.array_equal(one.mask_video, white[0])
    assert request.seed == 0 and request.num_frames is None and request.lora == []


def test_a_long_clip_is_decoded_in_chunks(host):
    size = {"n4_num_frames": 17, "n4_steps": 2, "n4_width": 48, "n4_height": 32}
    made = workflow("text_to_video", n1_model="text", n4_options=["7", 0], **size)
    made["7"] = {"class_type": "CogVideoXFlaxOptions", "inputs": {"window": 9}}
    results = host.run(made)
    how = {"num_frames": 17, "num_inference_steps": 2, "width": 48, "height": 32}
    expected = results["1"][0].pipe(PROMPT, seed=7, window=9, progress=False, **how)
    assert np.array_equal(as_uint8(results["5"][0]), expected.frames[0])


def test_a_model_that_does_not_fit_leaves_the_devices(host, monkeypatch):
    results = host.run(workflow("text_to_video", n4_steps=2))
    assert {"transformer", "vae"} <= results["1"][0].pipe._loaded.keys()
    monkeypatch.setattr(Pipeline, "fits_at_once", lambda self: False)
    again = host.run(workflow("text_to_video", n4_steps=3))
    assert host.executed == ["4", "5", "6"] and not again["1"][0].pipe._loaded


def test_adapters_are_chained(host, pipe):
    (host.folder / "models" / "loras" / "a.safetensors").write_bytes(
        (ROOT / "weights" / "embedded_four_steps" / "pytorch_lora_weights.safetensors").read_bytes()
    )
    made = workflow("text_to_video", n4_model=["7", 0], n4_steps=2)
    made["7"] = {
        "class_type": "CogVideoXFlaxLora",
        "inputs": {"model": ["8", 0], "lora": "a.safetensors", "strength": -0.3},
    }
    made["8"] = copy.deepcopy(made["7"])
    made["8"]["inputs"] |= {"model": ["1", 0], "strength": 0.5}
    files = [{"file": str(host.folder / "models" / "loras" / "a.safetensors"), "scale": x} for x in (0.5, -0.3)]
    expected = pipe(PROMPT, seed=7, num_inference_steps=2, lora=files, progress=False)
    plain = pipe(PROMPT, seed=7, num_inference_steps=2, progress=False)
    assert np.array_equal(as_uint8(host.run(made)["5"][0]), expected.frames[0])
    assert not np.array_equal(expected.frames, plain.frames)
    images = host.run(workflow("text_to_video", n4_steps=2))["5"][0]  # the model's own weights again
    assert np.array_equal(as_uint8(images), plain.frames[0])


def test_upscaling(host):
    clip = smooth(7, 9, 32, 32)
    images, model = (
        torch.from_numpy(clip) / 255,
        host.run({"1": workflow("text_to_video", n1_model="text")["1"]})["1"][0],
    )
    how = {"scale": 2, "tile": "48x48", "overlap": 16}
    (large,) = run_node(host, "CogVideoXFlaxUpscale", model, images, **how)
    library = upscale(model.pipe, clip, UpscaleOptions(scale=2, tile=(48, 48), overlap=16), progress=False)
    assert np.array_equal(as_uint8(large), library) and library.shape == (9, 64, 64, 3)
    assert [(value, total) for value, total, _ in host.progress[-4:]] == [(1, 4), (2, 4), (3, 4), (4, 4)]

    def interrupt(value):
        host.interrupted = True

    host.on_progress = interrupt
    try:
        with pytest.raises(InterruptProcessingException):
            run_node(host, "CogVideoXFlaxUpscale", model, images, **how)
    finally:
        host.on_progress = lambda value: None
    assert host.progress[-1][:2] == (1, 4)


# --- refusals, in the words of the library ---


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"n4_num_frames": 18}, "num_frames"),
        ({"n4_scheduler": "flow_match"}, "unknown scheduler"),
        ({"n4_start_image": ["7", 0]}, "takes no image"),
        ({"n1_path_or_hub_id": "/nowhere/at all"}, "nowhere"),
    ],
)
def test_refusals(host, changes, message):
    made = workflow("text_to_video", **changes)
    made["7"] = {"class_type": "LoadImage", "inputs": {"image": "first_frame.png"}}
    with pytest.raises(InputError, match=message):
        host.run(made)


def test_prompts_of_another_model_are_refused(host):
    made = workflow("text_to_video", n3_model=["7", 0])
    made["7"] = workflow("image_to_video")["1"]
    with pytest.raises(InputError, match="another model"):
        host.run(made)


def test_options_that_are_texts(host):
    options = {"class_type": "CogVideoXFlaxOptions", "inputs": {"guidance_interval": "0,,1"}}
    with pytest.raises(InputError, match="guidance_interval"):
        host.run(workflow("text_to_video", n4_options=["7", 0]) | {"7": options})
