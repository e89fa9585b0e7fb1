"""Configuration: the schema, and its composition. The only room that knows Hydra."""

from echelon.config.schema import Config, Every, Launch, RunChoice, Track, Trainer

__all__ = ["Config", "Every", "Launch", "RunChoice", "Track", "Trainer"]
