"""One training over several processes and devices: DDP, FSDP, model parallel, sparse tables."""
