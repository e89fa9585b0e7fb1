#!/bin/bash
# bash job_submitter.sh --configs FILE: the commands of a file as jobs, from the code as it is now.
# Any option of `echelon submit` may follow, and settings such as launch.nodes=2.
exec echelon submit "$@"
