"""One training over several processes and devices.

`store.py`, `join_world.py` and `process_group.py` bring the processes together. A replica is one
copy of the model with its step: `ddp_replica.py` (every process holds the model whole),
`fsdp_replica.py` and `fsdp_wrap.py` (every process holds a shard), `model_parallel.py` (the layers
of one process on several devices), `sparse_tables.py` (gradients of embeddings, by rows).
"""
