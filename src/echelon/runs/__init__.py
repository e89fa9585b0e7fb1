"""One model of a run and its folder: paths, creation, search, status, metrics, failure, heartbeat.

Everything that reads a run folder (`runs`, `jobs`, `show`, `plot`, `logs`, sweeps, launchers) reads
it through this package.
"""
