"""Forecasts of a run's memory, work and time, from programs compiled for chips without having the chips."""

from cogvideox_flax.plan.chips import GPUS, topology_devices
from cogvideox_flax.plan.forecasting import Forecast, StageForecast, best_mesh, check_price, describe, forecast
from cogvideox_flax.plan.layout import Layout, chip_of_device, choose_mesh, layouts, meshes

__all__ = [
    "GPUS",
    "Forecast",
    "Layout",
    "StageForecast",
    "best_mesh",
    "check_price",
    "chip_of_device",
    "choose_mesh",
    "describe",
    "forecast",
    "layouts",
    "meshes",
    "topology_devices",
]
