"""`cogvideox convert`, `quantize` and `export`: checkpoints and adapters written."""

from __future__ import annotations

import argparse
import os

from cogvideox_flax import hub
from cogvideox_flax.checkpoint import is_native
from cogvideox_flax.checkpoint.quantize import quantize_checkpoint
from cogvideox_flax.conversion import convert as converting
from cogvideox_flax.conversion import export as exporting
from cogvideox_flax.conversion.download import Download, download, download_model
from cogvideox_flax.conversion.progress import progress_bar
from cogvideox_flax.errors import InputError
from cogvideox_flax.io.paths import expand_user
from cogvideox_flax.lora import export_adapter, fitting_releases, known_models, open_adapter


def convert(args: argparse.Namespace) -> None:
    """Convert a Hugging Face checkpoint, or some of its components, to the native format."""
    src = expand_user(args.src)
    try:
        if os.path.exists(src):
            if args.revision:
                raise InputError(f"--revision belongs to a hub id; {src} is a directory on this machine")
            source = Download(src, {})
        else:
            hub_id = hub.full_name(args.src)
            configs = download(hub_id, args.revision)
            family = converting.family_of(configs.folder, args.dst, args.release, args.component)
            source = download_model(hub_id, configs, family, args.component)
        with progress_bar() as progress:
            converting.convert(
                source.folder,
                args.dst,
                components=args.component,
                whole=args.component is None and not is_native(args.dst),
                dtype=args.dtype,
                release=args.release,
                variant=args.variant,
                origin=source.origin,
                progress=progress,
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt("\nstopped; components that were complete are kept for the next attempt") from None
    print(args.dst)


def export(args: argparse.Namespace) -> None:
    """Write a native checkpoint in diffusers' layout, or an adapter for other programs."""
    native = hub.native_here(args.src)
    if native is not None:
        if args.layout is not None:
            raise InputError(f"--as is of adapters; {args.src} is a checkpoint, and written in diffusers' layout")
        with progress_bar() as progress:
            exporting.export(native, args.dst, components=args.component, progress=progress)
        print(args.dst)
        return
    if args.component is not None:
        raise InputError(f"--component is of native checkpoints; {args.src} is none")
    with open_adapter(args.src) as file:
        family, config = known_models()[next(iter(fitting_releases(file)))]
        print(export_adapter(family, config, file, args.dst, args.layout or "peft"))


def quantize(args: argparse.Namespace) -> None:
    """Write a checkpoint again with weights of 8 bits."""
    quantize_checkpoint(hub.find(args.src, args.revision, variant=args.variant), args.dst, args.component, args.kind)
    print(args.dst)
