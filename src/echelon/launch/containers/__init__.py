"""Containers: the processes of a run inside an image (`launch.container`).

`runtime.py` says what a container runtime is; `apptainer`, `pyxis`, `enroot`, `podman` and
`charliecloud` are a file each. `command.py` turns a configuration into the words that stand before
the agent's own, which launchers call in one place each. `inside.py` is the first program inside,
`check.py` finds what is wrong with an image before anything is started, and `local_node.py` runs
the agent of launch=local in one.
"""
