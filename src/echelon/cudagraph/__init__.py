"""A whole training step as one CUDA graph: whether it can be captured, and its replay."""
