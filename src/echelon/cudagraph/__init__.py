"""A training step as one CUDA graph.

`capture.py` decides whether and when a step is captured, `host_state.py` finds what a replay would
leave out, `step_graph.py` holds the graph, its batches and its results.
"""
