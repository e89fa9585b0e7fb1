#!/bin/sh
# ./display-gpu-info.sh                                       who uses the GPUs of this node
# watch -n 0.5 "./display-gpu-info.sh | grep kevin"           only kevin's, twice a second
#
# The same in one command: echelon gpus --watch 0.5 --user kevin
exec python -m echelon gpus "$@"
