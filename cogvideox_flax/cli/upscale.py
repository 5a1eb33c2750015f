"""`cogvideox upscale`: a clip enlarged by a model that was fine-tuned for it."""

from __future__ import annotations

import argparse
from functools import partial

from cogvideox_flax.cli.prepare import check_runs, look, open_prepared
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate import upscale as upscaling
from cogvideox_flax.generate.request import options_of
from cogvideox_flax.generate.result import check_output, is_template, logging_replaced
from cogvideox_flax.generate.upscale_options import UpscaleOptions
from cogvideox_flax.io.source import FrameStream
from cogvideox_flax.io.video import HashedVideo, save_video


def upscale(args: argparse.Namespace) -> None:
    """Enlarge a clip, written as its frames are finished."""
    if args.model is None:
        raise InputError("upscaling takes a model that was fine-tuned for it, such as DOVE; name one with --model")
    if is_template(args.out):
        raise InputError(f"--out {args.out}: a clip has no prompt, seed or number to put into its name; name the file")
    check_output([args.out], args.overwrite)
    source = HashedVideo(args.clip)
    choice, manifest = look(args)
    given = {name: value for name in options_of(UpscaleOptions) if (value := getattr(args, name)) is not None}
    layout = upscaling.tile_layout(manifest, source.info, UpscaleOptions(**given), choice.dtype)
    prepared = check_runs(args, choice, manifest, [layout.run], args.out.absolute().parent)
    model, _ = open_prepared(args, lambda: prepared)
    progress = not args.quiet
    upscaling.check_memory(model, layout, progress=progress)
    run_tile = upscaling.tile_runner(model, layout, progress)
    frames = FrameStream(layout.shape, partial(upscaling.upscale_frames, source, layout, run_tile, progress=progress))
    try:
        with logging_replaced([args.out]):
            fps = layout.clip.fps or manifest.model.defaults.fps
            save_video(args.out, frames, fps, upscaling.describe(layout, model, args.clip), sound=args.clip)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("\nstopped; nothing was written") from None
    print(args.out)
