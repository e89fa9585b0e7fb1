"""`echelon submit`: the commands of a file as jobs, from a copy of the code as it is now.

command_file, shell_syntax   the file, by the rules of a shell
launch_modes                 how each command is launched: plain, torchrun, lightning, srun, wandb
source_copy                  which files are copied beside the job
plan, dry_run                the submission before it happens, and how --dry-run shows it
prerequisites                what would fail only in the job
enqueue                      the submission as it happens: copy, environment, sbatch
wandb_agent                  `wandb agent` as a job
"""
