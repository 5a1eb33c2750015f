"""HunyuanVideo-1.5's text and image encoders and its tokenizers, against transformers and diffusers."""

from __future__ import annotations

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from diffusers import HunyuanVideo15Pipeline
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts
from PIL import Image
from safetensors.numpy import load_file, save_file

from cogvideox_flax.checkpoint import Manifest, load_component
from cogvideox_flax.conversion.convert import convert
from cogvideox_flax.errors import CheckpointError, InputError
from cogvideox_flax.generate.media import UNSEEN
from cogvideox_flax.generate.request import GenerationRequest
from cogvideox_flax.generate.resolve import resolve
from cogvideox_flax.io.clips import resize_frames
from cogvideox_flax.models.hunyuan_video15.qwen import QwenConfig
from cogvideox_flax.models.hunyuan_video15.releases import RELEASES as HUNYUAN_RELEASES
from cogvideox_flax.models.hunyuan_video15.siglip import VisionConfig
from cogvideox_flax.models.hunyuan_video15.tokenizer import Tokenizers, TokenizersConfig, quoted_text
from cogvideox_flax.models.registry import get_family
from cogvideox_flax.sharding import make_mesh
from tests.support.hunyuan_layout import FULL_BYT5, FULL_QWEN, build
from tests.support.hunyuan_tokenizers import save_byt5_tokenizer, save_qwen_tokenizer
from tests.support.reference import random, relative_error, rms_error
from tests.support.released_layout import randomise

BAR = 1e-4
LENGTH = 13
PROMPTS = [
    "a cat plays the guitar",
    'a sign says "OPEN", another “CLOSED”; "OPEN" again',
    "",
    "naïve café 東京 \n\n  spaces <|im_end|> 1234 it's",
]


def convert_one(module, folder, component, rename=lambda name: name):
    """A native directory of one component; rename: of the tensors, for other layouts of the same weights."""
    module.save_pretrained(folder / "hf" / component)
    (file,) = (folder / "hf" / component).glob("*.safetensors")
    save_file({rename(name): value for name, value in load_file(file).items()}, file)
    convert(folder / "hf", folder / "native", components=[component])
    return folder / "native"


def prompt_ids(vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Two prompts of 13 and of 6 tokens, and their mask."""
    ids = np.random.default_rng(0).integers(0, vocabulary, (2, LENGTH), dtype=np.int32)
    return ids, (np.arange(LENGTH) < np.array([[LENGTH], [6]])).astype(np.int32)


def run_qwen(module, ids, mask):
    with torch.no_grad():
        out = module(torch.tensor(ids).long(), attention_mask=torch.tensor(mask).long(), output_hidden_states=True)
    return out.hidden_states[-3].float().numpy()


@pytest.fixture(scope="module")
def qwen():
    return randomise(build("text_encoder", small=True, vocab_size=60))


@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model."])
def test_qwen(qwen, tmp_path, prefix):
    """The second prompt is padded; what stands at its padding is not compared."""
    native = convert_one(qwen, tmp_path, "text_encoder", lambda name: prefix + name)
    ids, mask = prompt_ids(60)
    ours = jax.jit(lambda model, ids: model(ids))(load_component("text_encoder", native, "float32"), ids)
    theirs = run_qwen(qwen, ids, mask)
    kept = mask.astype(bool)
    assert relative_error(np.asarray(ours)[kept], theirs[kept]) < BAR


def test_qwen_in_bfloat16(qwen, tmp_path):
    native = convert_one(qwen, tmp_path, "text_encoder")
    ids, mask = prompt_ids(60)
    kept, exact = mask.astype(bool), run_qwen(qwen, ids, mask)
    rounded = transformers.Qwen2_5_VLTextModel(qwen.config)
    rounded.load_state_dict(qwen.state_dict())
    theirs = run_qwen(rounded.to(torch.bfloat16).eval(), ids, mask)
    ours = np.asarray(load_component("text_encoder", native, "bfloat16")(ids), np.float32)
    assert rms_error(ours[kept], exact[kept]) <= rms_error(theirs[kept], exact[kept])


def test_configs_of_every_version():
    """theta, and the text part of a whole Qwen2.5-VL, stand in other places by version."""
    raw = {name: value for name, value in FULL_QWEN.items() if name != "rope_parameters"}
    assert QwenConfig.from_hf(raw | {"rope_theta": 1e6}) == QwenConfig()
    assert QwenConfig.from_hf({"text_config": raw | {"rope_parameters": {"rope_theta": 5e5}}}).rope_theta == 5e5
    with torch.device("meta"):
        assert VisionConfig.from_hf(build("image_encoder", small=False).config.to_dict()) == VisionConfig()
    assert VisionConfig().tokens == 729


def test_byt5_with_a_mask(tmp_path):
    module = randomise(build("text_encoder_2", small=True))
    native = convert_one(module, tmp_path, "text_encoder_2")
    ids, mask = prompt_ids(384)
    with torch.no_grad():
        theirs = module(torch.tensor(ids).long(), attention_mask=torch.tensor(mask).float())[0].numpy()
    encoder = load_component("text_encoder_2", native, "float32")
    assert relative_error(encoder(ids, mask), theirs) < BAR
    assert np.isfinite(encoder(ids, np.zeros_like(mask))).all()
    assert relative_error(encoder(ids), theirs) > 0.01  # padding matters without one


@pytest.mark.parametrize("prefix", ["", "vision_model."])
def test_siglip(tmp_path, prefix):
    module = randomise(build("image_encoder", small=True))
    bare = lambda name: name.removeprefix("vision_model.")  # noqa: E731
    native = convert_one(module, tmp_path, "image_encoder", lambda name: prefix + bare(name))
    images = random(0, 2, 42, 42, 3)
    with torch.no_grad():
        theirs = module(pixel_values=torch.from_numpy(np.array(images)).permute(0, 3, 1, 2)).last_hidden_state
    encoder = load_component("image_encoder", native, "float32")
    assert relative_error(encoder(images), theirs.numpy()) < BAR
    with pytest.raises(InputError, match=r"images must be \[B, 42, 42, 3\]"):
        encoder(images[:, :28])


@pytest.mark.parametrize("mesh", [(1, 1, 4), (2, 2, 2, True), (1, 8, 1)])
def test_every_mesh(qwen, tmp_path, mesh):
    """Two key heads of Qwen, three heads of ByT5 and one image for SigLIP do not all divide."""
    split = make_mesh(*mesh)
    ids, mask = prompt_ids(60)
    small_byt5, small_siglip = (randomise(build(name, small=True)) for name in ("text_encoder_2", "image_encoder"))
    each = [
        ("text_encoder", qwen, (ids,)),
        ("text_encoder_2", small_byt5, (ids, mask)),
        ("image_encoder", small_siglip, (random(0, 1, 42, 42, 3),)),
    ]
    if mesh[2] > 2:
        each.pop()  # two heads of SigLIP: a run on this mesh is refused
    for name, module, given in each:
        native = convert_one(module, tmp_path / name, name)
        expected = load_component(name, native, "float32")(*given)
        with jax.set_mesh(split):
            model = load_component(name, native, "float32", split)
            found = jax.jit(lambda model, *given: model(*given))(model, *map(jnp.asarray, given))
        assert relative_error(found, expected) < 1e-5


def test_images_for_siglip():
    """As transformers' own processor makes them."""
    image = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    processor = transformers.SiglipImageProcessor(size={"height": 42, "width": 42})
    theirs = processor.preprocess(images=Image.fromarray(image), return_tensors="np")["pixel_values"][0]
    ours = resize_frames(image[None], 42, 42)[0] / 127.5 - 1
    np.testing.assert_allclose(ours, theirs.transpose(1, 2, 0), atol=1e-6)


@pytest.fixture(scope="module", params=["tokenizer.json", "vocab.json"])
def tokenizers(request, tmp_path_factory):
    """(ours, Qwen2's of transformers, ByT5's of transformers)."""
    folder = tmp_path_factory.mktemp("tokenizers")
    save_qwen_tokenizer(folder / "tokenizer")
    save_byt5_tokenizer(folder / "tokenizer_2")
    theirs = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    byt5 = transformers.ByT5Tokenizer.from_pretrained(folder / "tokenizer_2")
    if request.param == "vocab.json":
        save_qwen_tokenizer(folder / "tokenizer", parts=True)
    return Tokenizers(folder, TokenizersConfig()), theirs, byt5


class Recorder(torch.nn.Module):
    """In the place of an encoder: keeps what it is given."""

    config, dtype = type("Config", (), {"d_model": 4})(), torch.float32

    def forward(self, input_ids, attention_mask, output_hidden_states=None):
        self.given = input_ids.numpy(), attention_mask.numpy()
        states = torch.zeros(*input_ids.shape, 4)
        return type("Out", (tuple,), {"hidden_states": [states] * 4})([states])


@pytest.mark.parametrize("prompt", [*PROMPTS, "long " * 1200], ids=["plain", "quoted", "empty", "odd", "long"])
def test_prompts_become_the_ids_of_the_reference(tokenizers, prompt, caplog):
    ours, theirs, _ = tokenizers
    recorder = Recorder()
    HunyuanVideo15Pipeline._get_mllm_prompt_embeds(recorder, theirs, [prompt], torch.device("cpu"))
    found = ours.prompts([prompt])
    for mine, expected in zip((found["ids"], found["mask"]), recorder.given, strict=True):
        np.testing.assert_array_equal(mine, expected)
    assert ("is cut" in caplog.text) == prompt.startswith("long")


QUOTED = [
    f'"{"ü" * 300}"',
    '"</s> <extra_id_3> x"',
    '"two\nlines" “a "b” c"',
    '“open “a “b” " ”” "\n“ “x" y ”" “',
    '"a \u2003<pad>\t b  <unk></s>  <extra_id_1>  c <pad>"',
]


@pytest.mark.parametrize("prompt", [*PROMPTS, *QUOTED])
def test_quoted_text_becomes_the_ids_of_the_reference(tokenizers, prompt, caplog):
    ours, _, byt5 = tokenizers
    recorder, found = Recorder(), ours.glyphs([prompt])
    assert quoted_text(prompt) == extract_glyph_texts(prompt)
    HunyuanVideo15Pipeline._get_byt5_prompt_embeds(byt5, recorder, [prompt], torch.device("cpu"))
    if quoted_text(prompt) is None:
        assert not found["mask"].any()
        return
    for mine, expected in zip((found["ids"], found["mask"]), recorder.given, strict=True):
        np.testing.assert_array_equal(mine, expected)
    assert ("are cut" in caplog.text) == ("ü" in prompt)


LONG = {"spaces": f'"{" " * 40000}"', "open": "“" * 40000, "odd": '“a"' * 40000}


@pytest.mark.parametrize("prompt", LONG.values(), ids=LONG)
def test_long_prompts_take_linear_time(tokenizers, prompt):
    """The square of their length takes 20 s or more."""
    ours, *_ = tokenizers
    start = time.process_time()
    ours.glyphs([prompt])
    ours.prompts([prompt])
    assert time.process_time() - start < 5


def test_tokens_that_an_encoder_does_not_have_are_refused(tmp_path):
    """Those of the prompt, and of quoted text with tokens that were added for more fonts than the encoder knows."""
    rows = save_qwen_tokenizer(tmp_path / "tokenizer")
    save_byt5_tokenizer(tmp_path / "tokenizer_2")
    (tmp_path / "tokenizer_2" / "added_tokens.json").write_text(json.dumps({"<font-9>": 384, "<font-8>": -1}))
    made = Tokenizers(tmp_path, TokenizersConfig(), vocab_size=rows, glyph_vocab_size=384)
    assert made.glyphs(['"<extra_id_124>"'])["ids"].max() == 383
    made.prompts(['"<font-9>"'])
    for token, i in {"<font-9>": 384, "<font-8>": -1}.items():
        with pytest.raises(InputError, match=rf"tokenizer_2 makes token {i} of the prompt.* has tokens 0 to 383; copy"):
            made.glyphs([f'"{token}"'])
    made.glyphs([f'"{"a" * 300}<font-9>"'])  # is cut
    with pytest.raises(InputError, match=rf"tokenizer makes token \d+ of the prompt.*has tokens 0 to {rows - 9}"):
        Tokenizers(tmp_path, TokenizersConfig(), vocab_size=rows - 8).prompts(["a cat"])


def test_faults_of_tokenizers(tmp_path):
    with pytest.raises(InputError, match=r"has neither tokenizer\.json nor vocab\.json and merges\.txt"):
        Tokenizers(tmp_path, TokenizersConfig())
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="cannot read the tokenizer in"):
        Tokenizers(tmp_path, TokenizersConfig())
    for name in ("tokenizer.json", "merges.txt"):
        save_qwen_tokenizer(tmp_path / "tokenizer")
        (tmp_path / "tokenizer" / name).write_text("version https://git-lfs.github.com/spec/v1\nsize 7031645\n")
        with pytest.raises(InputError, match=rf"tokenizer/{name}: it is a git-lfs pointer.* run `git lfs pull`"):
            Tokenizers(tmp_path, TokenizersConfig())
        (tmp_path / "tokenizer" / name).unlink()
    save_qwen_tokenizer(tmp_path / "tokenizer")
    made = Tokenizers(tmp_path, TokenizersConfig())  # ByT5's own tokens need no file
    with pytest.raises(InputError, match="list of prompts"):
        made.prompts("a cat")
    with pytest.raises(InputError, match="not valid Unicode"):
        made.glyphs(["\ud800"])


@pytest.mark.slow
def test_the_released_widths(tmp_path):
    """Two of Qwen2.5-VL's 26 layers, and all of ByT5's."""
    module = randomise(
        transformers.Qwen2_5_VLTextModel(
            transformers.Qwen2_5_VLTextConfig(**FULL_QWEN | {"num_hidden_layers": 4, "vocab_size": 1000})
        )
    )
    native = convert_one(module, tmp_path / "qwen", "text_encoder")
    ids, mask = prompt_ids(1000)
    expected = run_qwen(module, ids, mask)
    del module
    kept = mask.astype(bool)
    assert (
        relative_error(np.asarray(load_component("text_encoder", native, "float32")(ids))[kept], expected[kept]) < BAR
    )
    # attention without 1 / sqrt(head size) amplifies rounding, here by 12 layers, unless weights have T5's own scale
    torch.manual_seed(0)
    module = transformers.T5EncoderModel(transformers.T5Config(**FULL_BYT5)).eval()
    native = convert_one(module, tmp_path / "byt5", "text_encoder_2")
    with torch.no_grad():
        theirs = module(torch.tensor(ids).long(), attention_mask=torch.tensor(mask).float())[0].numpy()
    assert relative_error(load_component("text_encoder_2", native, "float32")(ids, mask), theirs) < BAR


@pytest.mark.parametrize("release", HUNYUAN_RELEASES.values(), ids=lambda r: r.name)
def test_configs_of_releases_survive_their_own_file(release):
    family = get_family(release.family)
    for name, kind in family.config_types().items():
        config = release.configs[name]
        assert kind.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    # a CFG-distilled release has the configs of the one that it was made from; guidance tells them apart
    manifest = Manifest.of_release(release)
    assert manifest.release is release
    image = [UNSEEN] if "image_encoder" in release.configs else None
    asked = resolve(GenerationRequest("a cat", image=image), manifest)
    assert asked.guided == ("distilled" not in release.name)


@pytest.mark.parametrize(
    ("component", "changes", "message"),
    [
        ("transformer", {"rope_axes": [16, 56, 58]}, "three even numbers that add up to the head size, 128"),
        ("transformer", {"rope_axes": [15, 57, 56]}, "three even numbers"),
        ("transformer", {"rope_axes": [64, 64]}, "three even numbers"),
        ("text_encoder", {"heads": 27}, "27 heads and 4 heads of keys"),
        ("text_encoder", {"kv_heads": 3}, "the same number of heads for each of the keys'"),
        ("image_encoder", {"heads": 7}, "1152 channels in 7 heads"),
        ("image_encoder", {"image_size": 13}, "images of a patch or more"),
        ("vae", {"block_channels": [128, 256]}, "2 levels for 16x compression; expected 5"),
    ],
    ids=str,
)
def test_values_that_no_model_has_are_refused(component, changes, message):
    config = HUNYUAN_RELEASES["hunyuanvideo1.5-480p-i2v"].configs[component]
    with pytest.raises(CheckpointError, match=message):
        type(config).from_dict(config.to_dict() | changes)
