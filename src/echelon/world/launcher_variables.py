"""The launchers that are recognised: for each, the variables that give the fields of a world."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from echelon.world import slurm_variables

Env = Mapping[str, str]


@dataclass(frozen=True)
class LauncherVariables:
    """One launcher: the variables of each field, of which the first that is set is read."""

    name: str
    variables: Mapping[str, tuple[str, ...]]
    explain_refusal: Callable[[Env], str | None] = lambda env: None
    """Why these variables, though set, do not describe this process; None if they do."""

    def find_variable(self, env: Env, field: str) -> str | None:
        """Return the variable that gives a field here; None if none is set."""
        return next((name for name in self.variables.get(field, ()) if name in env), None)

    def list_missing_variables(self, env: Env) -> list[str]:
        """Return the variables that are missing for a rank or a size."""
        return [self.variables[f][0] for f in ("rank", "size") if not self.find_variable(env, f)]

    def has_any_variable(self, env: Env) -> bool:
        """Return whether any of its main variables is set, complete or not."""
        return any(self.find_variable(env, f) for f in ("rank", "size", "local_rank"))


def _explain_unused_pmi(env: Env) -> str | None:
    """Return why PMI's variables are not used, where srun set them."""
    # srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE too, and no local rank: the step has more. An
    # mpiexec inside a step (it starts its own daemons by srun) is recognised by its local rank.
    if slurm_variables.explain_not_a_step(env) or PMI.find_variable(env, "local_rank"):
        return None
    return "srun sets it as well; its step says more"


def _explain_unused_torchrun(env: Env) -> str | None:
    """Return why torchrun's variables are not used, where there is only WORLD_SIZE."""
    # WORLD_SIZE alone is the general-purpose cluster's, or exported by a Slurm script.
    return None if "RANK" in env or "LOCAL_RANK" in env else "says nothing without RANK"


def _explain_unused_cluster(env: Env) -> str | None:
    """Return why the cluster's variables are not used, where ranks are set."""
    ranks = [name for name in ("RANK", "LOCAL_RANK") if name in env]
    return f"{ranks[0]} is set: these are not one process per node" if ranks else None


TORCHRUN = LauncherVariables(
    "torchrun",
    {
        "rank": ("RANK",),
        "size": ("WORLD_SIZE",),
        "local_rank": ("LOCAL_RANK",),
        "local_size": ("LOCAL_WORLD_SIZE",),
        "node_rank": ("GROUP_RANK",),
        "nodes": ("GROUP_WORLD_SIZE",),
        "agent": ("TORCHELASTIC_RUN_ID",),
    },
    explain_refusal=_explain_unused_torchrun,
)
OPEN_MPI = LauncherVariables(
    "open mpi",
    {
        "rank": ("OMPI_COMM_WORLD_RANK",),
        "size": ("OMPI_COMM_WORLD_SIZE",),
        "local_rank": ("OMPI_COMM_WORLD_LOCAL_RANK",),
        "local_size": ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    },
)
PMI = LauncherVariables(  # MPICH, Intel MPI (Hydra); MVAPICH2; Cray PALS
    "pmi",
    {
        "rank": ("PMI_RANK", "MV2_COMM_WORLD_RANK"),
        "size": ("PMI_SIZE", "MV2_COMM_WORLD_SIZE"),
        "local_rank": ("MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK", "PMI_LOCAL_RANK"),
        "local_size": ("MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
    },
    explain_refusal=_explain_unused_pmi,
)
SLURM_STEP = LauncherVariables(
    "slurm step",
    {
        "rank": ("SLURM_PROCID",),
        "size": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "local_rank": ("SLURM_LOCALID",),
        "tasks_per_node": ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        "node_rank": ("SLURM_NODEID",),
        "nodes": ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
        "hosts": ("SLURM_STEP_NODELIST",),
        "step": ("SLURM_STEP_ID", "SLURM_STEPID"),
    },
    explain_refusal=slurm_variables.explain_not_a_step,
)
CLUSTER = LauncherVariables(
    "cluster variables",
    {"rank": ("NODE_RANK",), "size": ("WORLD_SIZE",)},
    explain_refusal=_explain_unused_cluster,
)

# MPI's variables win over a step's: inside an allocation mpirun starts its daemons by srun, and
# every process inherits the daemon's step.
KNOWN_LAUNCHERS = (TORCHRUN, OPEN_MPI, PMI, SLURM_STEP, CLUSTER)
NEVER_READ_VARIABLES = {
    "PMIX_RANK": "PMIx sets no world size beside it",
    "OMPI_COMM_WORLD_NODE_RANK": "counts the processes of a node, not nodes",
}


def choose_launcher(env: Env) -> LauncherVariables | None:
    """Return the first launcher that has its rank and size, else the first that has a part of
    them."""
    usable_launchers = [source for source in KNOWN_LAUNCHERS if not source.explain_refusal(env)]
    complete_launchers = [
        source for source in usable_launchers if not source.list_missing_variables(env)
    ]
    if complete_launchers[:1] == [TORCHRUN] and "LOCAL_RANK" not in env:
        # Scripts export RANK and WORLD_SIZE from the launcher's own variables. Where they say the
        # same, the launcher is the better witness: it knows who shares a machine.
        return next((s for s in complete_launchers[1:] if _names_same_rank(s, env)), TORCHRUN)
    return next(
        iter(
            complete_launchers
            + [source for source in usable_launchers if source.has_any_variable(env)]
        ),
        None,
    )


def _names_same_rank(source: LauncherVariables, env: Env) -> bool:
    """Return whether a launcher gives the same rank and size as RANK and WORLD_SIZE."""
    names = source.find_variable(env, "rank"), source.find_variable(env, "size")
    return [env[name] for name in names if name] == [env["RANK"], env["WORLD_SIZE"]]
