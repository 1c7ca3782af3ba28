#!/usr/bin/env bash
# utils/print_help.sh SCRIPT [ARGUMENT..]: where --help or -h is among the
# arguments, prints the comment at the top of SCRIPT and succeeds, so that asking
# what a script does installs and builds nothing.
for argument in "${@:2}"; do
  case "$argument" in
  -h | --help)
    sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$1"
    exit 0
    ;;
  esac
done
exit 1
