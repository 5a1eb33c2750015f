"""A small stand-in for ComfyUI, written from its published V3 interface.

It runs workflows, with caching by inputs, progress, previews and interruption, and takes no keyword that the interface
does not have.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from cogvideox_flax.io.video import read_video, save_video

_ANY = {"display_name", "tooltip", "lazy", "advanced"}
_WIDGET = {*_ANY, "default", "socketless", "force_input"}
_NUMBER = {*_WIDGET, "min", "max", "step", "control_after_generate", "display_mode"}
_TYPES = {
    "Boolean": _WIDGET | {"label_on", "label_off"},
    "Int": _NUMBER,
    "Float": _NUMBER | {"round"},
    "String": _WIDGET | {"multiline", "placeholder", "dynamic_prompts"},
    "Combo": _WIDGET | {"options", "control_after_generate", "upload", "image_folder"},
    **dict.fromkeys(("Image", "Mask", "Latent", "Video", "Audio"), _ANY),
}
"""Type -> keywords of its inputs."""

WIDGETS = ("BOOLEAN", "INT", "FLOAT", "STRING", "COMBO")
_VALUES: dict[str, Any] = {"BOOLEAN": bool, "INT": int, "FLOAT": (int, float), "STRING": str, "COMBO": str}


@dataclass
class Input:
    id: str
    type: str
    optional: bool
    how: dict[str, Any]


@dataclass
class Output:
    type: str
    display_name: str


def _io_type(name: str, keywords: set[str]) -> Any:
    def make_input(id: str, *, optional: bool = False, **how: Any) -> Input:
        assert set(how) <= keywords, f"{name}.Input has no {set(how) - keywords}"
        return Input(id, name, optional, how)

    def make_output(id: str | None = None, display_name: str | None = None, tooltip: str | None = None) -> Output:
        return Output(name, display_name or id or name)

    return types.SimpleNamespace(io_type=name, Input=make_input, Output=make_output)


@dataclass
class Schema:
    node_id: str
    display_name: str = ""
    category: str = "sd"
    inputs: list[Input] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    hidden: list[Any] = field(default_factory=list)
    description: str = ""
    is_output_node: bool = False
    not_idempotent: bool = False

    def ordered(self) -> list[Input]:
        """The inputs as the page shows them: the optional ones last."""
        return sorted(self.inputs, key=lambda each: each.optional)


class ComfyNode:
    pass


class ComfyExtension:
    pass


class NodeOutput:
    def __init__(self, *args: Any, ui: Any = None):
        self.args, self.ui = args, ui


class InterruptProcessingException(Exception):
    pass


@dataclass
class VideoComponents:
    images: Any
    frame_rate: Fraction
    audio: Any = None


class VideoFromComponents:
    def __init__(self, components: VideoComponents):
        self._components = components

    def get_components(self) -> VideoComponents:
        return self._components

    def frames(self) -> np.ndarray:
        """As ComfyUI writes them: rounded down."""
        return (self._components.images * 255).clamp(0, 255).byte().cpu().numpy()


def _modules(host: Host) -> dict[str, types.ModuleType]:
    def module(name: str, **contents: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__dict__.update(contents)
        return made

    class ProgressBar:
        def __init__(self, total: int, node_id: str | None = None):
            self.total = total

        def update_absolute(self, value: int, total: int | None = None, preview: Any = None) -> None:
            self.total = self.total if total is None else total
            host.report(value, self.total, preview)

    def throw_exception_if_processing_interrupted() -> None:
        if host.interrupted:
            host.interrupted = False
            raise InterruptProcessingException

    io = module("comfy_api.latest.io", Schema=Schema, ComfyNode=ComfyNode, NodeOutput=NodeOutput)
    io.__dict__.update({name: _io_type(name.upper(), keywords) for name, keywords in _TYPES.items()})
    io.__dict__["Custom"] = lambda name: _io_type(name, _ANY)
    latest = module(
        "comfy_api.latest",
        io=io,
        ComfyExtension=ComfyExtension,
        InputImpl=types.SimpleNamespace(VideoFromComponents=VideoFromComponents),
        Types=types.SimpleNamespace(VideoComponents=VideoComponents),
    )
    management = module(
        "comfy.model_management",
        throw_exception_if_processing_interrupted=throw_exception_if_processing_interrupted,
        InterruptProcessingException=InterruptProcessingException,
        unload_all_models=lambda: host.unloaded.append(host.running),
        soft_empty_cache=lambda: None,
    )
    paths = module(
        "folder_paths",
        get_folder_paths=lambda kind: [str(host.folder / "models" / kind)],
        get_filename_list=lambda kind: sorted(path.name for path in (host.folder / "models" / kind).iterdir()),
        get_full_path_or_raise=lambda kind, name: str(host.folder / "models" / kind / name),
    )
    utils = module("comfy.utils", ProgressBar=ProgressBar)
    comfy = module("comfy", utils=utils, model_management=management)
    return {x.__name__: x for x in (module("comfy_api", latest=latest), latest, comfy, utils, management, paths)}


PACKAGE = "comfy_custom_node"
"""The name under which the nodes are imported."""


class Host:
    """Nodes, and the results of the last run.

    folder: with models/diffusers, models/loras and input, as ComfyUI has them.

    Attributes:
        executed: the nodes of the last run that did not come from the cache.
        progress: value, total and preview, as the nodes of the last run told them.
        unloaded: the nodes before which other models left the devices.
        on_progress: called after each of these.
    """

    def __init__(self, folder: Path, package: Path):
        self.folder = folder
        self.cache: dict[str, tuple[str, tuple[Any, ...]]] = {}
        self.executed: list[str] = []
        self.progress: list[tuple[int, int, Any]] = []
        self.unloaded: list[str] = []
        self.running, self.interrupted = "", False
        self.on_progress: Callable[[int], None] = lambda value: None
        self._modules = _modules(self)
        sys.modules.update(self._modules)
        spec = importlib.util.spec_from_file_location(
            PACKAGE, package / "__init__.py", submodule_search_locations=[str(package)]
        )
        assert spec is not None and spec.loader is not None
        self.package = sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.package)
        extension = asyncio.run(self.package.comfy_entrypoint())
        found = [*asyncio.run(extension.get_node_list()), *_core_nodes(self)]
        self.nodes = {node.define_schema().node_id: node for node in found}

    def close(self) -> None:
        """Take the stand-ins out of Python's modules."""
        for name in [name for name in sys.modules if name in self._modules or name.partition(".")[0] == PACKAGE]:
            del sys.modules[name]

    def schema(self, class_type: str) -> Schema:
        return self.nodes[class_type].define_schema()

    def report(self, value: int, total: int, preview: Any) -> None:
        self.progress.append((value, total, preview))
        self.on_progress(value)

    def run(self, workflow: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
        """Run a workflow in the API's form; returns the outputs of each node."""
        for id, node in workflow.items():
            self._validate(workflow, id, self.schema(node["class_type"]))
        self.executed, self.progress, self.unloaded, self.interrupted = [], [], [], False
        return {id: self._outputs(workflow, id) for id in workflow}

    def _validate(self, workflow: dict[str, Any], id: str, schema: Schema) -> None:
        given, known = workflow[id]["inputs"], {each.id: each for each in schema.inputs}
        assert given.keys() <= known.keys(), f"{schema.node_id} has no {given.keys() - known.keys()}"
        for name, each in known.items():
            assert each.optional or name in given, f"{schema.node_id} lacks {name}"
            if isinstance(value := given.get(name), list):
                source = self.schema(workflow[value[0]]["class_type"]).outputs[value[1]]
                assert source.type == each.type, f"{schema.node_id}.{name} is {each.type}, got {source.type}"
            elif name in given:
                assert isinstance(value, _VALUES[each.type]), f"{schema.node_id}.{name} is {value!r}"
                assert each.type != "COMBO" or value in each.how["options"], f"{name} is {value!r}"
                if each.type in ("INT", "FLOAT"):
                    assert each.how["min"] <= value <= each.how["max"], f"{name} is {value!r}"

    def _signature(self, workflow: dict[str, Any], id: str) -> str:
        node = workflow[id]
        inputs = {
            name: (self._signature(workflow, value[0]), value[1]) if isinstance(value, list) else value
            for name, value in sorted(node["inputs"].items())
        }
        return json.dumps([node["class_type"], inputs])

    def _outputs(self, workflow: dict[str, Any], id: str) -> tuple[Any, ...]:
        signature = self._signature(workflow, id)
        if id in self.cache and self.cache[id][0] == signature:
            return self.cache[id][1]
        inputs = {
            name: self._outputs(workflow, value[0])[value[1]] if isinstance(value, list) else value
            for name, value in workflow[id]["inputs"].items()
        }
        self.running = id
        with torch.inference_mode():
            outputs = self.nodes[workflow[id]["class_type"]].execute(**inputs).args
        self.executed.append(id)
        self.cache[id] = signature, outputs
        return outputs

    def api_form(self, page: dict[str, Any]) -> dict[str, Any]:
        """A workflow of the page in the API's form."""
        links = {id: [str(source), slot] for id, source, slot, *_ in page["links"]}
        for _, source, slot, target, at, kind in page["links"]:
            ends = {node["id"]: node for node in page["nodes"]}
            assert ends[source]["outputs"][slot]["type"] == ends[target]["inputs"][at]["type"] == kind
        found = {}
        for node in page["nodes"]:
            schema, values = self.schema(node["type"]), iter(node["widgets_values"])
            linked = {each["name"]: each["link"] for each in node["inputs"]}
            inputs: dict[str, Any] = {}
            for each in schema.ordered():
                if each.type in WIDGETS:
                    inputs[each.id] = next(values)
                    if each.how.get("control_after_generate") or each.how.get("upload"):
                        next(values)  # "fixed" or "randomize"; the upload button
                elif linked[each.id] is not None:
                    inputs[each.id] = links[linked[each.id]]
            assert not list(values), f"{node['type']} has other widgets"
            assert [each["type"] for each in node["outputs"]] == [each.type for each in schema.outputs]
            found[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
        return found


def _core_nodes(host: Host) -> list[type[ComfyNode]]:
    """Nodes of ComfyUI that workflows of videos have."""
    io = sys.modules["comfy_api.latest"].io
    upload = Enum("UploadType", {"image": "image_upload", "video": "video_upload"})

    def files() -> list[str]:
        return sorted(path.name for path in (host.folder / "input").iterdir())

    class LoadImage(ComfyNode):
        @classmethod
        def define_schema(cls) -> Schema:
            image = io.Combo.Input("image", options=files(), upload=upload.image)
            return Schema("LoadImage", inputs=[image], outputs=[io.Image.Output(), io.Mask.Output()])

        @classmethod
        def execute(cls, image: str) -> NodeOutput:
            pixels = np.asarray(Image.open(host.folder / "input" / image).convert("RGB"))[None]
            return NodeOutput(torch.from_numpy(pixels.astype(np.float32) / 255), torch.zeros(pixels.shape[:3]))

    class LoadVideo(ComfyNode):
        @classmethod
        def define_schema(cls) -> Schema:
            file = io.Combo.Input("file", options=files(), upload=upload.video)
            return Schema("LoadVideo", inputs=[file], outputs=[io.Video.Output()])

        @classmethod
        def execute(cls, file: str) -> NodeOutput:
            frames, fps = read_video(host.folder / "input" / file)
            components = VideoComponents(torch.from_numpy(frames) / 255.0, Fraction(fps))
            return NodeOutput(VideoFromComponents(components))

    class GetVideoComponents(ComfyNode):
        @classmethod
        def define_schema(cls) -> Schema:
            outputs = [io.Image.Output(display_name="images"), io.Audio.Output(display_name="audio")]
            outputs.append(io.Float.Output(display_name="fps"))
            return Schema("GetVideoComponents", inputs=[io.Video.Input("video")], outputs=outputs)

        @classmethod
        def execute(cls, video: VideoFromComponents) -> NodeOutput:
            components = video.get_components()
            return NodeOutput(components.images, components.audio, float(components.frame_rate))

    class SaveVideo(ComfyNode):
        @classmethod
        def define_schema(cls) -> Schema:
            inputs = [io.Video.Input("video"), io.String.Input("filename_prefix", default="video/ComfyUI")]
            inputs.append(io.Combo.Input("format", options=["auto", "mp4"]))
            inputs.append(io.Combo.Input("codec", options=["auto", "h264"]))
            return Schema("SaveVideo", inputs=inputs, is_output_node=True)

        @classmethod
        def execute(cls, video: VideoFromComponents, filename_prefix: str, format: str, codec: str) -> NodeOutput:
            path = host.folder / "output" / f"{filename_prefix}_00001_.mp4"
            path.parent.mkdir(parents=True, exist_ok=True)
            save_video(path, video.frames(), int(video.get_components().frame_rate))
            return NodeOutput(ui=path)

    return [LoadImage, LoadVideo, GetVideoComponents, SaveVideo]
