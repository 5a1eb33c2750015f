"""`python -m conversion SRC DST`: convert a Hugging Face checkpoint to the native format."""

from __future__ import annotations

from cogvideox_flax.io.interrupts import EXIT_CODE, loaded  # isort: skip  (before all other imports

import argparse
import logging
import os
import sys

from cogvideox_flax.conversion.configs import find_family
from cogvideox_flax.conversion.convert import convert
from cogvideox_flax.conversion.download import Download, download, download_model
from cogvideox_flax.conversion.progress import progress_bar
from cogvideox_flax.conversion.write import FLOATS
from cogvideox_flax.errors import InputError, describe_file_error
from cogvideox_flax.io.paths import expand_user
from cogvideox_flax.models.registry import RELEASES, component_names


def main(argv: list[str] | None = None) -> int:
    """Parse, convert, report. Returns the exit code: 0 done, 2 the input cannot be served."""
    parser = argparse.ArgumentParser(prog="python -m conversion", description=__doc__)
    parser.add_argument("src", help="directory in the Hugging Face layout, or a hub id such as zai-org/CogVideoX-2b")
    parser.add_argument("dst", help="the native checkpoint to write, or to add components to")
    parser.add_argument("--component", nargs="+", choices=component_names(), help="default: all that SRC has")
    parser.add_argument("--dtype", choices=FLOATS, help="cast to this; default: keep what the source has")
    parser.add_argument(
        "--release", choices=RELEASES, help="the model, where SRC's config.json files are missing or wrong"
    )
    parser.add_argument("--revision", help="hub revision: branch, tag or commit")
    args = parser.parse_args(argv)
    loaded()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        src, dst = expand_user(args.src), expand_user(args.dst)
        if os.path.exists(src):
            if args.revision:
                raise InputError(f"--revision belongs to a hub id; {src} is a directory on this machine")
            source = Download(src, {})
        else:
            configs = download(args.src, args.revision)
            source = download_model(args.src, configs, find_family(configs.folder), args.component)
        with progress_bar() as progress:
            convert(
                source.folder,
                dst,
                components=args.component,
                dtype=args.dtype,
                release=args.release,
                origin=source.origin,
                progress=progress,
            )
    except InputError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except OSError as e:
        if (message := describe_file_error(e)) is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; components that were complete are kept for the next attempt", file=sys.stderr)
        return EXIT_CODE
    print(dst)
    return 0


if __name__ == "__main__":
    sys.exit(main())
