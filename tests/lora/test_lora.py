"""LoRA: the numbers of PEFT's formula, from our files and diffusers' own; training, meshes, and runs that use one."""

from __future__ import annotations

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import CogVideoXPipeline as Reference
from flax import nnx
from safetensors.numpy import load_file, save_file

from cogvideox_flax import sharding
from cogvideox_flax.checkpoint import load_transformer, parameters
from cogvideox_flax.cli import main
from cogvideox_flax.errors import CheckpointError, InputError
from cogvideox_flax.generate import journey
from cogvideox_flax.generate.denoise import DenoiseState
from cogvideox_flax.generate.pipeline import CogVideoXPipeline
from cogvideox_flax.io.video import read_metadata
from cogvideox_flax.lora import (
    FILE_NAME,
    add_lora,
    describe_lora,
    lora_parameters,
    merge,
    merge_files,
    merge_lora,
    save_lora,
    with_parameters,
)
from cogvideox_flax.lora import files as lora_files
from cogvideox_flax.models.cogvideox.model import LORA, CogVideoX
from tests.models.test_transformer import FLOAT32_BAR, inputs, run_reference
from tests.support.commands import PROMPT, SIZE, generate
from tests.support.reference import convert_component, make_transformer, relative_error

pytest_plugins = ["tests.support.commands"]

MERGED_BAR = 1e-5  # of the output's standard deviation; kernel + a @ b rounds otherwise than two products
WIDTH = 64
MODULES = {"attn1.to_q": (WIDTH, WIDTH), "attn1.to_out.0": (WIDTH, WIDTH), "ff.net.2": (4 * WIDTH, WIDTH)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def reference():
    return make_transformer("cogvideox-5b")


@pytest.fixture(scope="module")
def converted(reference, folder):
    return convert_component("transformer", reference, folder)


@pytest.fixture(scope="module")
def model(converted):
    return load_transformer(converted)


@pytest.fixture(scope="module")
def args(reference):
    return inputs(reference, 3, 8, 12)


@pytest.fixture(scope="module")
def plain(model, args):
    return run_ours(model, *args)


@jax.jit
def call(model, latents, context, timestep):
    return model(latents.transpose(0, 1, 3, 4, 2), context, timestep)


def run_ours(model, latents, context, timestep):
    return np.asarray(call(model, latents, context, jnp.array(timestep)))


def with_random_b(model, size=0.1):
    """As after training: b is no longer zero."""
    random = np.random.default_rng(5)
    b = {name: x for name, x in lora_parameters(model).items() if name.endswith(".b")}
    return with_parameters(
        model, {name: size * random.normal(size=x.shape).astype(np.float32) for name, x in b.items()}
    )


@pytest.fixture(scope="module")
def adapted(model):
    return with_random_b(add_lora(CogVideoX, model, 4, 6, tuple(LORA.targets), rngs=nnx.Rngs(1)))


def run_reference_with(reference, args, state, scale):
    """PEFT's documented formula, base(x) + scale B A x, beside the reference's own linear maps. scale: of a module."""
    hooks = []
    for name in {name.split(".lora_")[0] for name in state}:
        a, b = (state[f"{name}.lora_{half}.weight"].float() for half in "AB")
        path = name.removeprefix("transformer.")
        factor = scale(path)

        def add(module, inputs, output, a=a, b=b, factor=factor):
            return output + factor * (inputs[0] @ a.T @ b.T)

        hooks.append(reference.get_submodule(path).register_forward_hook(add))
    try:
        return run_reference(reference, *args)
    finally:
        for hook in hooks:
            hook.remove()


def merged_file(model, path, scale=1.0, alpha=None, family=CogVideoX, mesh=None):
    """The model with an adapter of a file in its weights."""
    record = describe_lora(family, path, scale, model.config, alpha)
    return merge_files(family, model.config, model, [record], mesh=mesh).denoiser


def random_state(modules=MODULES, layers=(0, 1), rank=3, seed=2):
    """Tensors of an adapter as PEFT names them, without the component's name."""
    random = np.random.default_rng(seed)
    state = {}
    for layer in layers:
        for module, (width, out) in modules.items():
            name = f"transformer_blocks.{layer}.{module}"
            state[f"{name}.lora_A.weight"] = torch.tensor(random.normal(size=(rank, width)) / 8, dtype=torch.float32)
            state[f"{name}.lora_B.weight"] = torch.tensor(random.normal(size=(out, rank)) / 8, dtype=torch.float32)
    return state


# --- against the reference ---


def test_diffusers_reads_our_file_and_computes_the_same(reference, adapted, args, plain, tmp_path):
    path = save_lora(CogVideoX, tmp_path, adapted)
    assert path == tmp_path / FILE_NAME
    state, metadata = Reference.lora_state_dict(tmp_path, weight_name=FILE_NAME, return_lora_metadata=True)
    assert len(state) == 2 * 2 * len(LORA.targets)
    assert (metadata["transformer.r"], metadata["transformer.lora_alpha"]) == (4, 6)
    assert metadata["transformer.alpha_pattern"] == metadata["transformer.rank_pattern"] == {}
    assert "attn1.to_out.0" in metadata["transformer.target_modules"]
    expected = run_reference_with(reference, args, state, lambda module: 6 / 4)
    ours = run_ours(adapted, *args)
    assert relative_error(ours, expected) < FLOAT32_BAR
    assert relative_error(plain, expected) > 0.1  # the adapter is no trifle


@pytest.mark.parametrize(
    ("metadata", "scale"),
    [
        (None, lambda module: 1),  # alpha = rank
        ({"r": 3, "lora_alpha": 5}, lambda module: 5 / 3),
        ({"r": 3, "lora_alpha": 5, "use_rslora": True}, lambda module: 5 / 3**0.5),
        (
            {"lora_alpha": 5, "alpha_pattern": {"to_q": 2, "^transformer_blocks.1.ff.net.2": 9}},
            lambda module: (2 if "to_q" in module else 9 if "1.ff" in module else 5) / 3,
        ),
    ],
    ids=["no alpha", "alpha", "rslora", "patterns"],
)
def test_a_file_that_diffusers_wrote(reference, model, args, tmp_path, metadata, scale):
    state = random_state()
    Reference.save_lora_weights(tmp_path, state, transformer_lora_adapter_metadata=metadata)
    ours = run_ours(merged_file(model, tmp_path, 0.8), *args)
    expected = run_reference_with(reference, args, state, lambda module: 0.8 * scale(module))
    assert relative_error(ours, expected) < FLOAT32_BAR


def test_older_names_alphas_and_layers_that_differ(reference, model, args, tmp_path):
    """Layer 0 alone has to_q; to_out's ranks and alphas differ between the layers."""
    one, two = random_state({"attn1.to_q": (64, 64)}, (0,)), random_state({"attn1.to_out.0": (64, 64)}, (0,), 2)
    three = random_state({"attn1.to_out.0": (64, 64)}, (1,), 5)
    state = one | two | three
    file = {}
    for name, value in state.items():
        old = name.replace("lora_A", "lora.down").replace("lora_B", "lora.up")
        file[f"transformer.{old}"] = value.numpy().astype(np.float16)
        state[name] = value.half()
    for module, alpha in (("0.attn1.to_q", 1.5), ("1.attn1.to_out.0", 2.0)):
        file[f"transformer.transformer_blocks.{module}.alpha"] = np.array(alpha, np.float32)
    save_file(file, tmp_path / "old.safetensors")
    scales = {"0.attn1.to_q": 1.5 / 3, "0.attn1.to_out.0": 1, "1.attn1.to_out.0": 2 / 5}
    expected = run_reference_with(reference, args, state, lambda module: scales[module.partition(".")[2]])
    ours = run_ours(merged_file(model, tmp_path / "old.safetensors"), *args)
    assert relative_error(ours, expected) < FLOAT32_BAR


def test_through_peft(reference, adapted, args, tmp_path):
    pytest.importorskip("peft")
    save_lora(CogVideoX, tmp_path, adapted)
    reference.load_lora_adapter(tmp_path, prefix="transformer", weight_name=FILE_NAME)
    try:
        expected = run_reference(reference, *args)
    finally:
        reference.unload_lora()
    assert relative_error(run_ours(adapted, *args), expected) < FLOAT32_BAR


# --- the model ---


def test_a_new_adapter_changes_nothing(model, args, plain):
    fresh = add_lora(CogVideoX, model, 4, rngs=nnx.Rngs(0))
    assert sorted(lora_parameters(fresh)) == sorted(
        f"blocks.attn.{t}.{half}" for t in LORA.default_targets for half in "ab"
    )
    a = np.asarray(lora_parameters(fresh)["blocks.attn.q.a"])
    assert a.shape == (2, WIDTH, 4)
    assert 0.9 * WIDTH**-0.5 < np.abs(a).max() <= WIDTH**-0.5
    assert (a[0] != a[1]).all()
    everywhere = add_lora(CogVideoX, model, 4, 6, tuple(LORA.targets), rngs=nnx.Rngs(0))
    assert (run_ours(everywhere, *args) == plain).all()
    assert not lora_parameters(model)


def test_merged_is_plain_and_computes_the_same(model, adapted, args):
    merged = merge_lora(adapted)
    assert jax.tree.structure(merged) == jax.tree.structure(model)
    ours, expected = run_ours(merged, *args), run_ours(adapted, *args)
    assert relative_error(ours, expected) < MERGED_BAR
    assert lora_parameters(adapted)  # stays as it was


def test_bfloat16(converted, tmp_path, adapted):
    plain = load_transformer(converted, dtype="bfloat16")
    half = add_lora(CogVideoX, plain, 4, 6, tuple(LORA.targets), rngs=nnx.Rngs(0))
    half = with_parameters(half, lora_parameters(adapted))
    merged = parameters(merged_file(plain, save_lora(CogVideoX, tmp_path, adapted)))
    assert {x.dtype for x in merged.values()} == {jnp.dtype("bfloat16")}
    exact = np.asarray(parameters(merge_lora(adapted))["blocks.attn.q.kernel"])
    kernel = np.asarray(parameters(adapted)["blocks.attn.q.base.kernel"])
    rounding = 2**-8 * (np.abs(exact) + np.abs(kernel)).max()  # of the kernel as it was and of the sum
    assert np.abs(np.asarray(merged["blocks.attn.q.kernel"], np.float32) - exact).max() < rounding

    x = jax.random.normal(jax.random.key(0), (3, WIDTH))
    full, low = (jax.tree.map(lambda leaf: leaf[1], m.blocks.attn.q) for m in (adapted, half))
    got = low(x.astype(jnp.bfloat16), out_dtype=jnp.float32)
    assert got.dtype == jnp.float32
    assert low(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert 1e-4 < relative_error(got, full(x)) < 2e-2  # inputs of 8 bits, sums of 24


def test_files_come_back_bit_for_bit(model, adapted, tmp_path):
    back = merged_file(model, save_lora(CogVideoX, tmp_path / "a.safetensors", adapted))
    for name, value in parameters(back).items():
        np.testing.assert_array_equal(value, parameters(merge_lora(adapted))[name], name)


def test_targets_of_several_ranks_come_back(model, tmp_path):
    one = add_lora(CogVideoX, model, 2, 1, ["v"], rngs=nnx.Rngs(0))
    mixed = with_random_b(add_lora(CogVideoX, one, 5, 0.5, ["up"], rngs=nnx.Rngs(1)))
    back, expected = merged_file(model, save_lora(CogVideoX, tmp_path, mixed)), parameters(merge_lora(mixed))
    assert all((value == expected[name]).all() for name, value in parameters(back).items())
    text = Reference.lora_state_dict(tmp_path, weight_name=FILE_NAME, return_lora_metadata=True)[1]
    assert (text["transformer.r"], text["transformer.lora_alpha"]) == (2, 1)
    assert text["transformer.rank_pattern"] == {"ff.net.0.proj": 5}
    assert text["transformer.alpha_pattern"] == {"ff.net.0.proj": 0.5}


def test_gradients_reach_the_adapters_alone(model, args):
    fresh = add_lora(CogVideoX, model, 4, rngs=nnx.Rngs(0))
    latents, context, timestep = args

    @jax.jit
    def gradient(model, trained):
        def loss(trained):
            out = call(with_parameters(model, trained), latents, context, jnp.array(timestep))
            return jnp.square(out - 1).mean()

        return jax.grad(loss)(trained)

    first = gradient(fresh, lora_parameters(fresh))
    assert first.keys() == lora_parameters(fresh).keys()
    for name, g in first.items():  # at b = 0, b alone feels anything, in every layer
        assert (np.abs(g).max((1, 2)) > 0).all() == name.endswith(".b"), name
    moved = {name: x - np.float32(0.1) * np.asarray(first[name]) for name, x in lora_parameters(fresh).items()}
    assert all(np.abs(g).max() > 0 for g in gradient(fresh, moved).values())
    trained = with_parameters(fresh, moved)
    for name, value in parameters(trained).items():
        if name not in moved:
            assert value is parameters(fresh)[name]
    with pytest.raises(KeyError, match=r"no parameters blocks\.attn\.q\.c"):
        with_parameters(fresh, {"blocks.attn.q.c": first["blocks.attn.q.a"]})


def test_on_a_mesh(converted, adapted, args, tmp_path):
    mesh = sharding.make_mesh(tp=2)
    path = save_lora(CogVideoX, tmp_path, adapted)
    plain = load_transformer(converted, mesh=mesh)
    spread = add_lora(CogVideoX, plain, 4, 6, tuple(LORA.targets), rngs=nnx.Rngs(1), mesh=mesh)
    places = {name: x.sharding for name, x in lora_parameters(spread).items()}
    values = {name: np.asarray(x) for name, x in lora_parameters(adapted).items()}
    spread = with_parameters(spread, {name: jax.device_put(x, places[name]) for name, x in values.items()})
    shares = {name: x.addressable_shards[0].data.shape for name, x in lora_parameters(spread).items()}
    assert shares["blocks.attn.k.a"] == (2, WIDTH, 4)
    assert shares["blocks.attn.k.b"] == (2, 4, WIDTH // 2)
    assert shares["blocks.attn.out.a"] == (2, WIDTH // 2, 4)
    assert shares["blocks.mlp.up.b"] == (2, 4, 2 * WIDTH)
    assert shares["blocks.mlp.down.a"] == (2, 2 * WIDTH, 4)
    expected = run_ours(adapted, *args)
    with jax.set_mesh(mesh):
        assert relative_error(run_ours(spread, *args), expected) < MERGED_BAR
    whole = parameters(merge_lora(adapted))
    rows = CogVideoX.components["transformer"].sharding
    for merged in (merge_lora(spread), merged_file(plain, path, mesh=mesh)):
        for name, value in parameters(merged).items():
            np.testing.assert_allclose(value, whole[name], atol=1e-6)
            assert value.sharding == sharding.parameter_sharding(mesh, rows, name, value.shape), name
    fresh = add_lora(CogVideoX, load_transformer(converted, mesh=mesh), 4, rngs=nnx.Rngs(0), mesh=mesh)
    assert lora_parameters(fresh)["blocks.attn.q.b"].addressable_shards[0].data.shape == (2, 4, WIDTH // 2)


# --- refusals ---


def name(layer=0, module="attn1.to_q", half="A"):
    return f"transformer.transformer_blocks.{layer}.{module}.lora_{half}.weight"


def pair(layer=0, module="attn1.to_q", a=(3, 64), b=(64, 3), dtype=np.float32):
    return {name(layer, module, "A"): np.ones(a, dtype), name(layer, module, "B"): np.ones(b, dtype)}


NAN = {name(half="A"): np.full((3, 64), np.nan, np.float32), name(half="B"): np.ones((64, 3), np.float32)}


@pytest.mark.parametrize(
    ("tensors", "metadata", "messages"),
    [
        (
            pair() | pair(0, "norm1.norm") | pair(1, "norm1.norm") | {"x": np.ones(1, np.float32)},
            {},
            [
                "3 faults",
                "unknown  transformer.transformer_blocks.*.norm1.norm.lora_A.weight",
                "unknown  x",
                "layouts that are read are in docs/adapters.md",
            ],
        ),
        (pair(b=(60, 3)), {}, ["got (3, 64) and (60, 3), expected (rank, 64) and (64, rank)"]),
        (pair(b=(64, 4)), {}, ["got (3, 64) and (64, 4)"]),
        (pair(a=(0, 64), b=(64, 0)), {}, ["got (0, 64)"]),
        (pair(2), {}, ["2.attn1.to_q.lora_A.weight: the model's last layer is 1"]),
        ({name(): np.ones((3, 64), np.float32)}, {}, [f"missing  lora_B beside {name()}"]),
        (pair() | {name().replace("lora_A", "lora_down"): np.ones((3, 64), np.float32)}, {}, ["twice    "]),
        (pair(dtype=np.int32), {}, ["got int32, expected bfloat16, float16 or float32"]),
        ({}, {}, ["missing  any tensor"]),
        (NAN, {}, ["holds NaN or infinity in transformer.transformer_blocks.0.attn1.to_q.lora_A"]),
        (pair(), {"transformer.r": 3}, ["damaged lora_adapter_metadata (KeyError: 'lora_alpha')"]),
        (pair(), {"transformer.lora_alpha": "8"}, ["must hold numbers"]),
        (pair(), {"transformer.lora_alpha": float("nan")}, ["has alpha nan"]),
        (pair(), {"transformer.lora_alpha": 10**400}, ["must hold numbers"]),
        (pair(), [1], ["damaged lora_adapter_metadata"]),
        (pair(), {"transformer.lora_alpha": 8, "transformer.alpha_pattern": {".*to_q": 1}}, ["regular expressions"]),
    ],
)
def test_files_that_do_not_fit(model, tmp_path, tensors, metadata, messages):
    path = tmp_path / "bad.safetensors"
    save_file(tensors, path, {"lora_adapter_metadata": json.dumps(metadata)} if metadata else None)
    with pytest.raises(CheckpointError) as error:
        merged_file(model, path)
    assert all(message in str(error.value) for message in messages), error.value
    assert str(path) in str(error.value)


def test_other_refusals(model, adapted, tmp_path):
    with pytest.raises(CheckpointError, match=f"cannot read .*{FILE_NAME}: No such file"):
        merged_file(model, tmp_path)
    with pytest.raises(CheckpointError, match="File name too long"):
        merged_file(model, "a" * 300)
    torch.save({name(): torch.ones(3, 64)}, tmp_path / "adapter.bin")
    with pytest.raises(CheckpointError, match="pickled PyTorch weights, which are never read"):
        merged_file(model, tmp_path / "adapter.bin")
    path = save_lora(CogVideoX, tmp_path / "good.safetensors", adapted)
    with pytest.raises(InputError, match=r"must be a finite number .* got nan"):
        merged_file(model, path, float("nan"))
    with pytest.raises(InputError, match="alpha of a LoRA must be a finite number"):
        merged_file(model, path, alpha=float("inf"))
    with pytest.raises(InputError, match="has a LoRA already; merge_lora makes it"):
        merged_file(adapted, path)
    with pytest.raises(InputError, match="nothing to write"):
        save_lora(CogVideoX, tmp_path, model)
    for options, message in (
        ({"rank": 0}, "must be 1 or more"),
        ({"rank": 4, "targets": ["q", "to_k"]}, "unknown LoRA targets to_k; known are q, k"),
        ({"rank": 4, "targets": []}, "at least one target"),
    ):
        with pytest.raises(InputError, match=message):
            add_lora(CogVideoX, model, **options, rngs=nnx.Rngs(0))


# --- runs ---


@pytest.fixture(scope="module")
def files(native, tmp_path_factory):
    """Two adapters for the model of the shell commands' tests."""
    folder = tmp_path_factory.mktemp("adapters")
    plain = load_transformer(native)
    one = with_random_b(add_lora(CogVideoX, plain, 4, rngs=nnx.Rngs(1)), 0.3)
    two = with_random_b(add_lora(CogVideoX, plain, 2, targets=["up"], rngs=nnx.Rngs(2)), 0.3)
    return save_lora(CogVideoX, folder / "one.safetensors", one), save_lora(CogVideoX, folder / "two.safetensors", two)


def test_a_pipeline_takes_several(native, files):
    one, two = files
    plain = parameters(load_transformer(native))
    delta = {}
    for path, target in ((one, "attn.q"), (two, "mlp.up")):
        merged = parameters(merged_file(load_transformer(native), path))
        delta[f"blocks.{target}.kernel"] = merged[f"blocks.{target}.kernel"] - plain[f"blocks.{target}.kernel"]
    pipe = CogVideoXPipeline.from_pretrained(native, dtype="float32")
    pipe.load_lora(one)  # before the weights are there
    assert "transformer" not in pipe._loaded
    assert pipe.transformer is pipe.transformer
    pipe.load_lora(two, -0.5)  # after
    for _ in range(2):
        found = parameters(pipe.transformer)
        for key, scale in (("blocks.attn.q.kernel", 1), ("blocks.mlp.up.kernel", -0.5)):
            np.testing.assert_allclose(found[key], plain[key] + scale * delta[key], atol=1e-5)
        pipe.release()  # and when it is loaded again
    assert [(record["file"], record["scale"]) for record in pipe.loras] == [(str(one), 1.0), (str(two), -0.5)]


def test_an_adapter_that_cannot_be_merged_changes_nothing(native, files, tmp_path):
    save_file({name: np.full_like(x, np.nan) for name, x in load_file(files[0]).items()}, tmp_path / "nan.safetensors")
    pipe = CogVideoXPipeline.from_pretrained(native, dtype="float32")
    pipe.load_lora(files[0], name="good")
    transformer, records = pipe.transformer, pipe.loras
    with pytest.raises(InputError, match="holds NaN or infinity"):
        pipe.load_lora(tmp_path / "nan.safetensors", name="bad")
    assert (pipe.loras, pipe.get_list_adapters(), pipe.get_active_adapters()) == (records, ["good"], ["good"])
    assert pipe.transformer is transformer


def test_a_file_that_changes_while_it_is_loaded_is_refused(native, files, tmp_path, monkeypatch):
    path = shutil.copy(files[0], tmp_path / "a.safetensors")
    pipe = CogVideoXPipeline.from_pretrained(native, dtype="float32")
    pipe.load_lora(path)

    def open_adapter(*args):
        shutil.copy(files[1], path)
        return lora_files.open_adapter(*args)

    monkeypatch.setattr(merge, "open_adapter", open_adapter)
    with pytest.raises(InputError, match=r"a\.safetensors changed while this run was under way; start it again"):
        pipe.component("transformer")


@pytest.fixture(scope="module")
def begun(native, tmp_path_factory):
    """A directory in which stage 1 was run."""
    run = tmp_path_factory.mktemp("begun")
    assert main(["encode", PROMPT, "--model", str(native), "--dir", str(run), "--dtype", "float32", "--quiet"]) == 0
    return run


@pytest.fixture
def run_dir(begun, tmp_path):
    return shutil.copytree(begun, tmp_path / "run", ignore=shutil.ignore_patterns(".lock"))


@pytest.fixture
def cheap_loop(monkeypatch):
    """In place of denoising: latents that only tell which weights there were. Lists the calls."""
    calls = []

    def denoise(model, run, conditioning, **_):
        yield from ()
        denoiser = model.denoiser(run)
        size = run.size
        calls.append(size)
        total = sum(np.abs(x).sum() for x in parameters(denoiser).values())
        latents = np.full(size.latent_shape(conditioning.batch), total / 1e3, np.float32)
        return iter_of(DenoiseState(np.int32(2), latents, None))

    def iter_of(state):
        yield state

    monkeypatch.setattr(journey, "denoise", denoise)
    return calls


def test_staged_runs_remember_and_notice(paths, native, files, run_dir, tmp_path, cheap_loop, cheap_decoder):
    one, two = files
    adapter = shutil.copy(one, tmp_path / "mine.safetensors")

    def denoised(*more):
        cheap_loop.clear()
        (path,) = paths("denoise", "--dir", run_dir, *SIZE, "--steps", 2, *more)
        return bool(cheap_loop), load_file(path)["latents"]

    _, without = denoised()
    new, first = denoised("--lora", adapter)
    assert new
    assert (first != without).all()
    settings = json.loads((run_dir / "generation_config.json").read_text())["lora"]
    assert [(record["file"], record["scale"]) for record in settings] == [(str(adapter), 1.0)]
    assert not denoised()[0]  # the settings' adapter
    assert not denoised("--lora", f"{adapter}:1")[0]
    (video,) = paths("decode", "--dir", run_dir)
    named = [{**record, "file": "mine.safetensors"} for record in settings]
    assert read_metadata(video)["settings"]["lora"] == named, "without the paths"
    new, weaker = denoised("--lora", f"{adapter}:0.5")
    assert new
    assert (weaker != first).all()
    shutil.copy(two, adapter)
    assert denoised()[0]  # another file of the same name
    both = denoised("--lora", one, "--lora", f"{two}:0.5")[1]
    new, again = denoised("--no-lora")
    assert new
    assert (again == without).all()
    out = paths(*generate(native, tmp_path / "x.npz", "--lora", one, "--lora", f"{two}:0.5"))[0]
    assert (np.load(out)["latents"] == both.transpose(0, 2, 3, 4, 1)).all()


def test_latents_of_another_adapter_are_not_decoded(refused, paths, files, run_dir, cheap_loop):
    """A run that was stopped between its settings and its latents."""
    paths("denoise", "--dir", run_dir, *SIZE, "--steps", 2)
    path = run_dir / "generation_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"lora": [{"file": str(files[0]), "scale": 1.0, "sha256": "0" * 16}]}))
    assert "made with other settings than this run's (lora '[]' is now" in refused("decode", "--dir", run_dir)


def test_runs_refuse_before_anything_is_loaded(refused, layout, run_dir, adapted, tmp_path):
    other = save_lora(CogVideoX, tmp_path / "a:b.safetensors", with_random_b(adapted))
    tensors = load_file(other)
    save_file(pair(a=(3, 48)), tmp_path / "narrow.safetensors")
    save_file({key: tensors[key] for key in list(tensors)[:1]}, tmp_path / "half.safetensors")
    out = tmp_path / "v.mp4"
    for value, message in (
        (tmp_path / "none.safetensors", "none.safetensors: No such file"),
        (f"{tmp_path}/none.safetensors:0.5", "none.safetensors: No such file"),
        (f"{tmp_path}/none.safetensors:much", "none.safetensors:much: No such file"),
        (f"{other}:nan", "must be a finite number (1 is as trained); got nan"),
        (tmp_path / "narrow.safetensors", "expected (rank, 64) and (64, rank)"),
        (tmp_path / "half.safetensors", "missing  lora_B"),
        (layout / "transformer" / "diffusion_pytorch_model.safetensors", "unknown  patch_embed.proj.weight"),
    ):
        assert message in refused(*generate(layout, out, "--lora", value))
        assert message in refused("denoise", "--dir", run_dir, "--lora", value)
    settings = json.loads((run_dir / "generation_config.json").read_text())
    for bad in ([1], [{"file": "x"}], "x"):
        (run_dir / "generation_config.json").write_text(json.dumps(settings | {"lora": bad}))
        assert "has no usable lora" in refused("denoise", "--dir", run_dir)
