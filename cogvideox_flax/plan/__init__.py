"""Forecasts of a run's memory, work and time, from programs compiled for chips without having the chips."""

from cogvideox_flax.plan.chips import GPUS, topology_devices
from cogvideox_flax.plan.forecasting import Forecast, StageForecast, best_mesh, check_price, describe, forecast
from cogvideox_flax.plan.layout import chip_of_device, meshes, suitable_layouts

__all__ = [
    "GPUS",
    "Forecast",
    "StageForecast",
    "best_mesh",
    "check_price",
    "chip_of_device",
    "describe",
    "forecast",
    "meshes",
    "suitable_layouts",
    "topology_devices",
]
