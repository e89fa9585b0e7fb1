"""How a training does: speed, memory, FLOPS, profiles, stragglers."""
