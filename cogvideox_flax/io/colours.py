"""HDR and wide gamut frames in the colours of SDR video, BT.709.

HDR light above the reference white of 203 cd/m² is tone mapped by the EETF of BT.2408, Annex 5, with a source peak of
1000 cd/m². The brightest of a pixel's three channels gives the factor of all three, which keeps its hue. Primaries are
converted linearly (BT.2087) and clipped. SDR video is displayed with a gamma of 2.4 (BT.1886).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from jaxtyping import Float, Float32, UInt8, UInt16

log = logging.getLogger(__name__)

WHITE, PEAK = 203, 1000  # cd/m²: the reference white of BT.2408, clause 2.1; the nominal peak of HLG and most PQ
_GAMMA = 2.4
_PQ, _HLG = HDR = 16, 18
"""Transfer functions, numbered by H.273 as in FFmpeg."""
_STEPS = 2**14
"""Of the tables over light, which is spaced by its square root: less than half a level of 8 bits each."""

_D65 = (0.3127, 0.3290)
_BT709 = ((0.640, 0.330), (0.300, 0.600), (0.150, 0.060))
_BT2020 = ((0.708, 0.292), (0.170, 0.797), (0.131, 0.046))
_P3 = ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060))
_PRIMARIES = {9: ("BT.2020", _BT2020), 12: ("Display P3", _P3)}
"""Primaries wider than those of BT.709, numbered by H.273 -> x and y of red, green, blue."""


@dataclass(frozen=True, eq=False)
class ToBT709:
    """Frames of 16-bit RGB, as coded -> 8-bit RGB in BT.709.

    name: what they are, for messages.
    light: of each code, with 1 for the reference white; of HLG, of the scene.
    luminance: weights of the channels, for the OOTF of HLG; else None.
    tone: the factor of light at each step of `PEAK` and above; None for SDR.
    matrix: from linear RGB to that of BT.709.
    """

    name: str
    light: Float32[np.ndarray, " 65536"]
    luminance: Float32[np.ndarray, " 3"] | None
    tone: Float32[np.ndarray, " steps"] | None
    matrix: Float32[np.ndarray, "3 3"]

    def __call__(self, codes: UInt16[np.ndarray, "H W 3"]) -> UInt8[np.ndarray, "H W 3"]:
        light = self.light[codes]
        if self.luminance is not None:  # BT.2100, table 5: the OOTF, of gamma 1.2 at a peak of 1000 cd/m²
            light *= PEAK / WHITE * np.power(light @ self.luminance, np.float32(0.2))[..., None]
        if self.tone is not None:
            light *= self.tone[_steps(light.max(-1) * (WHITE / _PQ_PEAK))][..., None]
        return _CODES[_steps(np.clip(light @ self.matrix.T, 0, 1))]


@lru_cache(maxsize=16)
def to_bt709(transfer: int, primaries: int) -> ToBT709 | None:
    """What converts such frames; None for those that are near BT.709 already.

    transfer, primaries: numbered by H.273.
    """
    is_hdr = transfer in HDR
    if not is_hdr and primaries not in _PRIMARIES:
        return None
    name, chromaticities = _PRIMARIES.get(primaries, ("BT.709", _BT709) if primaries == 1 else _PRIMARIES[9])
    matrix = np.linalg.inv(_to_xyz(_BT709)) @ _to_xyz(chromaticities)
    codes = np.arange(2**16) / (2**16 - 1)
    light = {_PQ: pq_light(codes) / WHITE, _HLG: hlg_scene(codes)}.get(transfer, codes**_GAMMA)
    luminance = _to_xyz(chromaticities)[1].astype(np.float32) if transfer == _HLG else None
    name = {_PQ: "HDR (PQ)", _HLG: "HDR (HLG)"}.get(transfer, f"in the colours of {name}")
    return ToBT709(name, light.astype(np.float32), luminance, _tone() if is_hdr else None, matrix.astype(np.float32))


@lru_cache(maxsize=1024)  # a line for each file
def say_converted(path: Path, name: str) -> None:
    """Log that a file is converted; name: of `ToBT709`."""
    log.info("%s is %s: converted to BT.709, SDR with its white at %d nits", path, name, WHITE)


_M1, _M2, _C1, _C2, _C3 = 2610 / 16384, 2523 / 32, 3424 / 4096, 2413 / 128, 2392 / 128
_PQ_PEAK = 10_000  # cd/m²


def pq_light(codes: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """PQ's EOTF, BT.2100, table 4: codes in [0, 1] -> cd/m²."""
    power = codes ** (1 / _M2)
    return _PQ_PEAK * (np.maximum(power - _C1, 0) / (_C2 - _C3 * power)) ** (1 / _M1)


def pq_codes(light: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """The inverse of `pq_light`."""
    power = (light / _PQ_PEAK) ** _M1
    return ((_C1 + _C2 * power) / (1 + _C3 * power)) ** _M2


def hlg_scene(codes: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """HLG's inverse OETF, BT.2100, table 5: codes -> light of the scene, both in [0, 1]."""
    a = 0.17883277
    b, c = 1 - 4 * a, 0.5 - a * np.log(4 * a)
    return np.where(codes <= 0.5, codes**2 / 3, (np.exp((codes - c) / a) + b) / 12)


def tone_mapped(light: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """The EETF of BT.2408, Annex 5, from a peak of `PEAK` to one of `WHITE`, without black level lift; cd/m²."""
    peak = pq_codes(np.asarray(float(PEAK)))
    target = pq_codes(np.asarray(float(WHITE))) / peak
    code = np.minimum(pq_codes(light) / peak, 1)
    knee = 1.5 * target - 0.5
    t = np.maximum(code - knee, 0) / (1 - knee)
    spline = (2 * t**3 - 3 * t**2 + 1) * knee + (t**3 - 2 * t**2 + t) * (1 - knee) + (3 * t**2 - 2 * t**3) * target
    return pq_light(np.where(code < knee, code, spline) * peak)


def _tone() -> Float32[np.ndarray, " steps"]:
    light = np.maximum(_PQ_PEAK * _LIGHT, 1e-6)
    return (tone_mapped(light) / light).astype(np.float32)


def _to_xyz(chromaticities: tuple[tuple[float, float], ...]) -> Float[np.ndarray, "3 3"]:
    """The matrix from linear RGB with a white of D65 to XYZ (SMPTE RP 177)."""
    *primaries, white = ([x / y, 1, (1 - x - y) / y] for x, y in (*chromaticities, _D65))
    columns = np.stack(primaries, 1)
    return columns * np.linalg.solve(columns, np.asarray(white))


def _steps(light: Float32[np.ndarray, "*shape"]) -> np.ndarray:
    return (np.sqrt(np.minimum(light, 1)) * (_STEPS - 1) + 0.5).astype(np.int32)


_LIGHT = (np.arange(_STEPS) / (_STEPS - 1)) ** 2
_CODES = np.rint(255 * _LIGHT ** (1 / _GAMMA)).astype(np.uint8)
