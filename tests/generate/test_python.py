"""Python's way in: the embedded model without a name, help and completion, diffusers' names, what a notebook shows."""

from __future__ import annotations

import ast
import base64
import dataclasses
import inspect
import os
import re
import sys

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from cogvideox_flax import RELEASES, CogVideoXPipeline, GenerationRequest, GenerationResult, Pipeline
from cogvideox_flax.checkpoint import Manifest
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.diffusers_names import CALL, METHODS
from cogvideox_flax.generate.resolve import resolve
from cogvideox_flax.io.video import read_video
from cogvideox_flax.lora import add_lora, save_lora
from cogvideox_flax.models.cogvideox.model import CogVideoX
from cogvideox_flax.schedulers import DDIMScheduler
from tests.support import processes
from tests.support.commands import ROOT

PROMPT = "a red circle moves up"
QUICK = {"num_inference_steps": 2, "progress": False}

PIPELINES = [
    *(getattr(diffusers, f"CogVideoX{kind}Pipeline") for kind in ("", "ImageToVideo", "VideoToVideo", "FunControl")),
    diffusers.HunyuanVideo15Pipeline,
    diffusers.HunyuanVideo15ImageToVideoPipeline,
]


@pytest.fixture(scope="module")
def pipe():
    return Pipeline.from_pretrained()


@pytest.fixture(scope="module")
def video(pipe):
    return pipe(PROMPT, seed=5, **QUICK)


def test_the_embedded_models_have_names(pipe):
    assert (pipe.native_dir.name, pipe.dtype) == ("embedded", "float32")
    assert Pipeline.from_pretrained("embedded").manifest == pipe.manifest
    assert CogVideoXPipeline.from_pretrained("embedded-image-to-video").native_dir.name == "embedded_image_to_video"


@pytest.mark.parametrize("dtype", [jnp.bfloat16, "bfloat16", np.dtype(jnp.bfloat16)], ids=["type", "name", "dtype"])
def test_dtypes_of_jax_are_dtypes(dtype):
    assert Pipeline.from_pretrained(dtype=dtype).dtype == "bfloat16"
    with pytest.raises(InputError, match="unknown dtype 'int8'"):
        Pipeline.from_pretrained(dtype=jnp.int8)


def test_the_call_shows_every_option_with_its_type_and_help(pipe):
    found = inspect.signature(pipe).parameters
    for field in dataclasses.fields(GenerationRequest)[1:]:
        assert found[field.name].default == field.default and found[field.name].annotation == field.type
        if option := field.metadata.get("option"):
            assert " ".join(f"{field.name}: {option.help}".split()) in " ".join(Pipeline.__call__.__doc__.split())
    assert list(found)[:3] == ["prompt", "negative_prompt", "num_frames"]
    assert {"callback", "progress"} <= found.keys()


def test_an_unknown_keyword_is_answered(pipe):
    with pytest.raises(TypeError, match="there is no option 'sede'; did you mean 'seed'"):
        pipe(PROMPT, sede=1)
    for name in ("steps", "stepz"):
        with pytest.raises(TypeError, match=f"there is no option '{name}'; did you mean 'num_inference_steps'"):
            pipe("x", **{name: 3})
    with pytest.raises(TypeError, match="a prompt is missing"):
        pipe()
    with pytest.raises(TypeError, match="says everything"):
        pipe(GenerationRequest(PROMPT), seed=1)


def test_a_prompt_stands_for_a_request(pipe):
    conditioning = pipe.encode(PROMPT, progress=False)
    same = pipe.encode(GenerationRequest([PROMPT]), progress=False)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), conditioning, same))
    assert pipe.resolve([PROMPT, PROMPT]).batch == 2


def test_a_run_stays_and_another_models_is_resolved_again(pipe):
    run = pipe.resolve(PROMPT)
    assert pipe.resolve(run) is run
    size = {name: getattr(run.request, name) for name in ("num_frames", "height", "width")}
    other = resolve(GenerationRequest(PROMPT, **size), Manifest.of_release(RELEASES["cogvideox-2b"]))
    for given in (other, resolve(GenerationRequest(PROMPT), pipe.manifest, "bfloat16")):
        found = pipe.resolve(given)
        assert (found.manifest, found.dtype) == (pipe.manifest, pipe.dtype)


def test_what_is_printed_is_short_and_says_what_it_is(pipe, video):
    conditioning = pipe.encode(PROMPT, progress=False)
    state = next(pipe.denoise(conditioning, GenerationRequest(PROMPT, num_inference_steps=2)))
    found = [repr(each) for each in (pipe, video, conditioning, state)]
    assert all(len(text) < 300 for text in found)
    assert found[0] == "<Pipeline of embedded, float32>"
    assert found[1] == f"<GenerationResult: 17 frames of 64x64, 8 fps, uint8; {PROMPT!r}, seed 5>"
    assert found[2] == "<Conditioning with guidance: prompt_embeds [1, 24, 128]>"
    assert found[3] == "<DenoiseState after step 1: latents [1, 5, 8, 8, 16]>"


def test_a_notebook_shows_the_videos(video, tmp_path):
    page = video._repr_html_()
    assert page.count("<video") == 1 and f"{PROMPT}, seed 5" in page
    (data,) = re.findall(r"data:video/mp4;base64,([\w+/=]+)", page)
    (tmp_path / "x.mp4").write_bytes(base64.b64decode(data))
    assert read_video(tmp_path / "x.mp4")[0].shape == (17, 64, 64, 3)
    many = GenerationResult(np.repeat(video.frames, 10, 0), 8, {"prompt": ["<script>"] * 10, "seed": list(range(10))})
    page = many._repr_html_()
    assert page.count("<video") == 8 and "and 2 more" in page and "&lt;script&gt;, seed 7" in page
    assert "<script>" not in page
    assert dataclasses.replace(video, frames=video.frames / np.float32(255))._repr_html_() is None


def test_output_types_of_diffusers(pipe, video):
    as_float = pipe(PROMPT, seed=5, output_type="np", **QUICK).frames
    np.testing.assert_array_equal(as_float, pipe(PROMPT, seed=5, output_type="float", **QUICK).frames)
    (images,) = pipe(PROMPT, seed=5, output_type="pil", **QUICK).frames
    assert isinstance(images[0], Image.Image)
    np.testing.assert_array_equal(np.stack(images), video.frames[0])


def test_embeds_stand_for_prompts(pipe, video):
    """Also as another library's arrays; checked before anything runs."""
    text = pipe.encode(PROMPT, progress=False)
    embeds, negative = (np.asarray(half["prompt_embeds"]) for half in (text.text, text.negative_text))
    given = {"prompt_embeds": embeds, "negative_prompt_embeds": negative, "seed": 5, **QUICK}
    np.testing.assert_array_equal(pipe(**given).frames, video.frames)
    two = {name: np.repeat(given[name], 2, 0) for name in ("prompt_embeds", "negative_prompt_embeds")}
    both = pipe(**two, guidance_scale=1, **QUICK).frames
    assert both.shape[0] == 2
    np.testing.assert_array_equal(pipe(prompt_embeds=two["prompt_embeds"], guidance_scale=1, **QUICK).frames, both)
    with pytest.raises(InputError, match="go with prompt_embeds"):
        pipe(PROMPT, negative_prompt_embeds=negative, **QUICK)
    with pytest.raises(InputError, match=r"negative_prompt_embeds must be \[1, 24, 128\] for 1 prompts; got \[2, 24,"):
        pipe(**given | {"negative_prompt_embeds": two["negative_prompt_embeds"]})
    with pytest.raises(InputError, match="prompt and prompt_embeds both say what to make"):
        pipe(PROMPT, **given)
    with pytest.raises(InputError, match="negative_prompt and negative_prompt_embeds both say what to make"):
        pipe(negative_prompt="blue", **given)
    with pytest.raises(InputError, match="one program begins with the prompts"):
        pipe(**given, one_program=True)


@pytest.mark.parametrize("theirs", PIPELINES, ids=lambda kind: kind.__name__)
def test_every_argument_of_diffusers_works_or_is_answered(pipe, theirs):
    ours = {*inspect.signature(pipe).parameters, *CALL, "self"}
    for name in inspect.signature(theirs.__call__).parameters:
        is_embeds = re.fullmatch("(negative_)?(prompt_embeds(_mask)?(_2)?|image_embeds)", name)
        assert name in ours or is_embeds, name
        if name in CALL:
            with pytest.raises(TypeError, match=f"{name} is diffusers' name; here: "):
                pipe(PROMPT, **{name: 1})


ITS_OWN = {
    *("download", "load_config", "get_config_dict", "extract_init_dict", "register_modules", "register_to_config"),
    *("register_for_auto_class", "push_to_hub", "save_config", "to_json_file", "to_json_string", "pack_weights"),
    *("prepare_extra_step_kwargs", "write_lora_layers", "reset_device_map", "numpy_to_pil", "set_attention_slice"),
    *("set_use_memory_efficient_attention_xformers", "enable_lora_hotswap", "prepare_cond_latents_and_mask"),
}
"""Methods by which diffusers' pipelines are built; nobody who makes videos calls them."""


@pytest.mark.parametrize("theirs", PIPELINES, ids=lambda kind: kind.__name__)
def test_every_method_of_diffusers_is_there_or_answered(pipe, theirs):
    names = {name for name in dir(theirs) if not name.startswith("_") and callable(getattr(theirs, name))}
    for name in names - ITS_OWN:
        if hasattr(pipe, name):
            continue
        with pytest.raises(AttributeError, match=f"diffusers' {name} is here: "):
            getattr(pipe, name)
    assert not any(hasattr(pipe, name) for name in METHODS)
    adapters = "load_lora_weights set_adapters unload_lora_weights get_active_adapters get_list_adapters"
    assert all(hasattr(pipe, name) for name in adapters.split())


def test_torch_dtype_is_answered():
    with pytest.raises(TypeError, match="dtype='bfloat16' of from_pretrained"):
        Pipeline.from_pretrained(torch_dtype=jnp.bfloat16)


@pytest.fixture
def adapters(pipe, tmp_path):
    """Two files."""
    files = []
    for seed in (1, 2):
        adapted = add_lora(CogVideoX, pipe.transformer, 2, rngs=nnx.Rngs(seed))
        adapted.blocks.attn.q.b = nnx.Param(jax.random.normal(jax.random.key(seed), adapted.blocks.attn.q.b.shape))
        files.append(save_lora(CogVideoX, tmp_path / str(seed), adapted))
    return files


def test_adapters_by_name(pipe, adapters):
    """Taken out again, they leave no trace: the same bits as before."""
    files = adapters

    def latents():
        return pipe(PROMPT, output_type="latent", **QUICK).frames

    plain = latents()
    pipe.load_lora_weights(files[0], adapter_name="one")
    one = latents()
    pipe.load_lora_weights(files[1].parent, weight_name=files[1].name, adapter_name="two")
    both = latents()
    assert pipe.get_list_adapters() == pipe.get_active_adapters() == ["one", "two"]
    assert len({each.tobytes() for each in (plain, one, both)}) == 3
    with pytest.raises(InputError, match="an adapter 'two' already"):
        pipe.load_lora(files[1], name="two")
    pipe.set_adapters("one")
    assert (latents() == one).all() and pipe.get_active_adapters() == ["one"]
    pipe.set_adapters(["one", "two"], [0.5, 1.0])
    weaker = latents()
    assert (weaker != both).any() and [record["scale"] for record in pipe.loras] == [0.5, 1.0]
    pipe.set_adapters(["one", "two"])
    assert (latents() == both).all()
    with pytest.raises(InputError, match="no adapter 'three'; loaded are: one, two"):
        pipe.set_adapters("three")
    with pytest.raises(InputError, match="a finite number for each of 2 adapters"):
        pipe.set_adapters(["one", "two"], [1.0])
    assert (latents() == both).all()
    pipe.unload_lora_weights()
    assert (latents() == plain).all() and pipe.get_list_adapters() == []


def run_as_notebook(cells):
    """Run cells one after the other; returns their names, and what a notebook shows of the values of last lines."""
    names, shown = {"__name__": "__main__"}, []
    for cell in cells:
        tree = ast.parse(cell)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "README.md", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "README.md", "eval"), names)
            shown.append(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))
    return names, shown


def test_the_cells_of_the_readme_run_as_a_notebook(tmp_path, monkeypatch):
    cells = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(cells) == 3
    monkeypatch.chdir(tmp_path)
    names, (page,) = run_as_notebook(cells)
    assert "a large green square moves to the left, seed 1</figcaption>" in page
    shapes = [(1, 17, 64, 64, 3), (1, 24, 128), (1, 5, 8, 8, 16), (1, 5, 8, 8, 16)]
    assert [names[name].shape for name in ("frames", "context", "v", "mean")] == shapes
    assert read_video("square.mp4")[0].shape == (17, 64, 64, 3)


def test_python_starts_quietly():
    """libtpu is installed here and there is no TPU, of which it would complain."""
    code = "from cogvideox_flax import Pipeline; print(Pipeline.from_pretrained().tokenizer(['a red ball']).shape)"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "TPU_"))}
    done = processes.run([sys.executable, "-c", f"{code}; import jax; jax.devices()"], env=env, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "(1, 24)\n", "")


@pytest.fixture
def fresh():
    return Pipeline.from_pretrained(None, "float32")


def latents_of(pipe, prompt=PROMPT, **options):
    return pipe(
        GenerationRequest(prompt, output_type="latent", num_inference_steps=2, **options), progress=False
    ).frames


def test_a_pipeline_remembers_nothing_of_a_request(fresh, adapters):
    """A request that is used again is read again: its prompts, and the adapters and the scheduler of the moment."""
    prompts = [PROMPT]
    request = GenerationRequest(prompts, output_type="latent", num_inference_steps=2)
    first = fresh(request, progress=False).frames
    prompts[0] = "a blue square moves down"
    assert fresh.resolve(request).request.prompt == prompts
    changed = fresh(request, progress=False).frames
    assert (changed != first).any() and (changed == latents_of(fresh, prompts[0])).all()
    plain = fresh.resolve(request).request
    fresh.load_lora(adapters[0])
    assert not plain.lora and len(fresh.resolve(request).request.lora) == 1
    conditioning = fresh.encode(request, progress=False)
    *_, state = fresh.denoise(conditioning, request)
    assert (state.latents != changed).any() and (state.latents == fresh(request, progress=False).frames).all()


def test_a_module_that_is_used_stays_under_adapters(fresh, adapters):
    """They are added to it, and taken out again."""
    own = jax.tree.map(lambda x: 0.5 * x, fresh.transformer)
    base = latents_of(fresh)
    fresh.replace_component("transformer", own)
    used = latents_of(fresh)
    adapted = latents_of(fresh, lora=[str(adapters[0])])
    assert len({x.tobytes() for x in (base, used, adapted)}) == 3
    assert (latents_of(fresh) == used).all()
    fresh.release("transformer")
    assert (latents_of(fresh) == base).all()
    assert (latents_of(fresh, lora=[str(adapters[0])]) != adapted).any()


def test_one_file_under_two_names(fresh, adapters):
    fresh.load_lora(adapters[0], name="one")
    fresh.load_lora(adapters[0], name="twin")
    both = latents_of(fresh)
    fresh.set_adapters("twin")
    assert fresh.get_active_adapters() == ["twin"] and fresh.get_list_adapters() == ["one", "twin"]
    assert (latents_of(fresh) != both).any()
    fresh.load_lora(adapters[1])
    fresh.load_lora(adapters[1], name="default_1")
    fresh.load_lora(adapters[1])
    assert fresh.get_active_adapters() == ["twin", "default_0", "default_1", "default_2"]


def test_what_is_assigned_is_used_or_refused(fresh):
    plain = latents_of(fresh)
    fresh.scheduler = "dpm"
    assert fresh.scheduler.kind == "dpm" and (latents_of(fresh) == latents_of(fresh, scheduler="dpm")).all()
    assert (latents_of(fresh, scheduler="ddim") == plain).all()
    fresh.scheduler = DDIMScheduler(fresh.manifest.configs["scheduler"])
    assert (latents_of(fresh) == plain).all()
    for wrong in (None, 3, "hunyuan", object()):
        with pytest.raises(InputError):
            fresh.scheduler = wrong
    fresh.transformer = jax.tree.map(lambda x: 0.5 * x, fresh.transformer)
    assert (latents_of(fresh) != plain).any()
    fresh.transformer = None  # its memory is free; the checkpoint's is loaded again
    assert (latents_of(fresh) == plain).all()
    with pytest.raises(InputError, match="expected a Transformer of this package"):
        fresh.transformer = fresh.vae
    for name in ("guider", "dtype", "mesh", "vea"):
        with pytest.raises(AttributeError, match=f"{name} of a pipeline cannot be set"):
            setattr(fresh, name, 3)


def test_a_warning_of_a_request_is_given_once(fresh, caplog):
    request = GenerationRequest("a purple hexagon", num_inference_steps=2)
    conditioning = fresh.encode(request, progress=False)
    list(fresh.denoise(conditioning, request))
    (said,) = {record.getMessage() for record in caplog.records if "hexagon" in record.getMessage()}
    assert caplog.text.count(said) == 1
    fresh(request, progress=False)
    assert caplog.text.count(said) == 2


def test_wrong_arguments_are_one_line(pipe):
    for wrong in ([1], np.zeros((1, 2, 3)), np.zeros((1, 5, 8, 8, 3)), "x"):
        with pytest.raises(InputError, match=r"latents must be a state or \[B, T, h, w, 16\]; got "):
            pipe.decode(wrong)
    with pytest.raises(TypeError, match="callback is 5; expected a function"):
        pipe(PROMPT, callback=5, **QUICK)
    with pytest.raises(InputError, match="mesh is '1,1,1'; expected"):
        Pipeline.from_pretrained(mesh="1,1,1")
    with pytest.raises(InputError, match=r"prompt_embeds must be \[1, 24, 128\] for 1 prompts; got \[\]"):
        pipe(prompt_embeds=5, guidance_scale=1, **QUICK)
    with pytest.raises(InputError, match="text_features of 'prompt_embeds' is 'x'"):
        pipe(prompt_embeds="x", guidance_scale=1, **QUICK)
    with pytest.raises(InputError):
        pipe.load_lora("x" * 5000)


def test_a_request_leaves_no_adapter_behind(fresh, adapters):
    own = fresh.transformer.blocks.attn.q.kernel[...]
    latents_of(fresh, lora=[str(adapters[0])])
    assert (fresh.transformer.blocks.attn.q.kernel[...] == own).all()


def test_an_assigned_scheduler_and_few_steps(fresh):
    """The settings of an adapter that is known come first, as they do where nothing is assigned."""
    request = GenerationRequest(PROMPT, lora=["embedded-four-steps"])
    expected = fresh.resolve(request).request
    fresh.scheduler = "dpm"
    found = fresh.resolve(request).request
    assert (found.num_inference_steps, found.guidance_scale, found.scheduler) == (
        expected.num_inference_steps,
        expected.guidance_scale,
        expected.scheduler,
    )
    assert fresh.resolve(PROMPT).scheduler.kind == "dpm"


def test_a_subclass_has_attributes_of_its_own():
    class Mine(Pipeline):
        def __init__(self, *args):
            super().__init__(*args)
            self.seen = 0

    pipe = Mine.from_pretrained(None, "float32")
    pipe.seen += 1
    with pytest.raises(AttributeError, match="mesh of a pipeline cannot be set"):
        pipe.mesh = 3


def test_settings_of_the_caller_hold_between_steps(fresh):
    """And not in them."""
    request = GenerationRequest(PROMPT, num_inference_steps=2, step_cache="taylorseer")
    *_, plain = fresh.run(request)
    with jax.numpy_rank_promotion("raise"), jax.transfer_guard("disallow"):
        events = fresh.run(request)
        for event in events:
            assert jax.config.jax_numpy_rank_promotion == "raise", event
    assert (event.result.frames == plain.result.frames).all()


def test_the_default_device_of_the_caller(fresh):
    """Also where another pipeline of the model has compiled the same programs for another device."""
    request = GenerationRequest(PROMPT, num_inference_steps=1, num_frames=9, force=True)
    for pipe, device in ((fresh, jax.devices()[0]), (Pipeline.from_pretrained(), jax.devices()[1])):
        with jax.default_device(device):
            pipe.release()
            *_, state = pipe.denoise(pipe.encode(request, progress=False), request)
        assert state.latents.devices() == {device}


def test_a_scheduler_from_outside_sees_the_table_of_its_run(fresh):
    lengths = []

    class Counting(DDIMScheduler):
        def step(self, steps, *args):
            lengths.append(len(steps))
            return super().step(steps, *args)

    fresh.scheduler = Counting(fresh.scheduler.config)
    fresh(PROMPT, num_inference_steps=3, num_frames=9, force=True, progress=False)
    assert set(lengths) == {3}
