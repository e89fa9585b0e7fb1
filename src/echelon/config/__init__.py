"""The configuration: its schema, how it is composed from files and overrides, and its validation.
This is the only package that imports Hydra."""

from echelon.config.schema import (
    Config,
    Interval,
    LaunchConfig,
    RunConfig,
    TrackConfig,
    TrainerConfig,
)

__all__ = ["Config", "Interval", "LaunchConfig", "RunConfig", "TrackConfig", "TrainerConfig"]
