#!/usr/bin/env bash
# Between a launcher and its program: profile some ranks, each into a report of its own, and run the others plain:
#   RANKS='0 7' torchrun --nproc-per-node 8 --no-python ranks.sh python train.py
#   RANKS='0 8 16 24' srun ranks.sh python train.py
# accelerate needs --no_python, deepspeed --no_python --no_local_rank. PRESET, OUTPUT and NSYS are those of profile.sh.
set -euo pipefail
here=$(dirname -- "$(readlink -f -- "$0")")
rank=${RANK:-${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-${PMI_RANK:-${SLURM_PROCID:?no rank is known}}}}}
case " ${RANKS:-0} " in
  *" $rank "*) OUTPUT=${OUTPUT:-run}-$(uname -n)-rank$rank exec "$here/profile.sh" "$@" ;;
  *) exec "$@" ;;
esac
