"""Curves of any length: a pyramid of lowest, highest and last points beside metrics.jsonl, and the
points that a screen can show of it. These modules import numpy, and are imported when a curve is
asked for."""
