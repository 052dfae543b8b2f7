#!/usr/bin/env bash
# End the capture that start.sh began, and write its report; the program runs on:
#   SESSION=serving stop.sh
# The session and the program are ended by: nsys shutdown --session=serving --kill=sigterm
set -euo pipefail
exec "${NSYS:-nsys}" stop --session="${SESSION:-nvprof_kit}"
