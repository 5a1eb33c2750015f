"""`CompiledComponents`: components with their compiled programs, and decoding, which needs no request."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.components import Components
from cogvideox_flax.generate.decoding import Decode, DecodePiece, Frames, decode_programs
from cogvideox_flax.generate.memory import check_memory
from cogvideox_flax.io.contents import fingerprint
from cogvideox_flax.io.paths import NotPrivateError
from cogvideox_flax.io.source import FrameStream
from cogvideox_flax.runtime.compile import Program, Programs
from cogvideox_flax.runtime.compile_cache import CompileCache
from cogvideox_flax.runtime.global_arrays import fetch, replicate
from cogvideox_flax.runtime.profiling import ProfilingOptions


class CompiledComponents(Components):
    """The part of a pipeline that needs no request: its compiled programs, and decoding.

    Attributes:
        profiling: what to record while it runs: memory, a profile, operations one by one.
    """

    def __init__(self, native_dir: Path, dtype: str, mesh: Mesh | None):
        super().__init__(native_dir, dtype, mesh)
        self.profiling = ProfilingOptions()
        configs = {name: part.to_dict() for name, part in self.manifest.configs.items()}
        self._compiled = Programs(dtype, mesh, fingerprint(configs))

    def keep_programs(self, folder: Path) -> None:
        """Keep compiled programs in a folder, and take those that are there: a second process compiles nothing.

        It applies to programs compiled after this call. A user-defined sampler's are not kept.

        Raises:
            InputError: others could put programs into the folder, or it cannot be made.
        """
        try:
            self._compiled.cache = CompileCache(folder)
        except NotPrivateError as e:
            raise InputError(f"compiled programs cannot be kept in {folder}: {e}; name a folder of your own") from e
        except OSError as e:
            raise InputError(f"compiled programs cannot be kept in {folder}: {e.strerror}; name another folder") from e

    def decode(
        self,
        latents: Float[Any, "B T h w C"],
        *,
        output_type: str = "uint8",
        tiling: bool = False,
        progress: bool = True,
    ) -> Frames:
        """Scaled latents (extra frames already dropped) to frames: uint8, or float32 in [0, 1] for "float".

        Raises:
            InputError: the decoder gives NaN or infinity.
        """
        family = self.manifest.model_family
        program = Decode(family.decode, output_type == "float", tiling)
        z = replicate(jnp.asarray(latents, jnp.float32), self.mesh)
        frames, finite = self._run(program, self.component(family.decoder), z, progress=progress)
        self.profiling.after_stage(program.name)
        if not finite:
            raise self._bad("VAE")
        return frames

    def decode_clips(
        self, latents: Float[Any, "B T h w C"], *, output_type: str = "uint8", progress: bool = True
    ) -> list[FrameStream]:
        """The same for long clips: each is decoded while its frames are read, a few of them at a time.

        On several hosts all of them read a clip to its end.

        Raises:
            InputError: the decoder gives NaN or infinity; while frames are read.
        """
        family, shape = self.manifest.model_family, tuple(latents.shape)
        as_float, model = output_type == "float", self.component(family.decoder)
        assert family.decode_piece is not None
        program = DecodePiece(family.decode_piece, as_float)
        one = jax.ShapeDtypeStruct((1, *shape[1:]), jnp.float32)
        frames, _ = jax.eval_shape(Decode(family.decode, as_float, False), model, one)

        def decode(i: int) -> Iterator[np.ndarray]:
            cache, start = None, 0
            for size in family.decoder_pieces(shape[1]):
                z = jnp.asarray(latents[i : i + 1, start : start + size], jnp.float32)
                frames, finite, cache = self._run(program, model, replicate(z, self.mesh), cache, progress=progress)
                if not finite:
                    raise self._bad("VAE")
                start += size
                yield fetch(frames)[0]

        return [FrameStream(frames.shape[1:], partial(decode, i), frames.dtype) for i in range(shape[0])]

    def check_decode_memory(
        self, shape: tuple[int, ...], *, tiling: bool = False, pieces: bool = False, progress: bool = True
    ) -> None:
        """The same for the decoder alone and latents [B, T, h, w, C]; pieces: for `decode_clips`."""
        if self.profiling.jit:
            programs = decode_programs(self.manifest, self.dtype, shape, self.mesh, (False, tiling), pieces)
            check_memory([("decode", programs)], self._compiled, progress=progress)

    def _run(self, program: Program, *args: Any, progress: bool) -> Any:
        return self._compiled.get(program)(*args, announce=progress, jit=self.profiling.jit)

    def _bad(self, part: str) -> InputError:
        return InputError(
            f"the {part} gives NaN or infinity in {self.dtype}. Try --dtype float32; if that gives the same, download "
            "the checkpoint again and convert it again."
        )
