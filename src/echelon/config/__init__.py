"""Configuration: the schema, and its composition. The only room that knows Hydra."""

from echelon.config.schema import (
    Config,
    Interval,
    LaunchConfig,
    RunConfig,
    TrackConfig,
    TrainerConfig,
)

__all__ = ["Config", "Interval", "LaunchConfig", "RunConfig", "TrackConfig", "TrainerConfig"]
