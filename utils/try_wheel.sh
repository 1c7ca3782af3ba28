#!/usr/bin/env bash
# Installs a wheel into an empty Debian, and times the way to the first tokens of a checkpoint.
#   utils/try_wheel.sh WHEEL SUITE [REQUIREMENT..]
#   utils/try_wheel.sh dist/moe_mlir-*.whl trixie transformers 'torch==2.14.*'
# The system is made by debootstrap: Python, pip and certificates, no compiler and no OpenMP.
# Needs root. pip's settings there are those here.
#   MOE_TRY_FOLDERS  folders that these settings name, to be seen at the same place
#   MOE_TRY_MIRROR   where Debian's packages are (default: the first of this system's)
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/utils/print_help.sh" "$0" "$@" && exit
[ $# -ge 2 ] || { echo "try_wheel: error: expected WHEEL SUITE [REQUIREMENT..], see --help" >&2; exit 2; }
wheel="$(realpath "$1")" suite="$2"
shift 2
mirror="${MOE_TRY_MIRROR:-$(sed -n 's/^URIs: *//p' /etc/apt/sources.list.d/*.sources | head -1)}"
system="$(mktemp -d)"
leave() {
  for folder in ${MOE_TRY_FOLDERS:-} /proc; do
    umount "$system$folder" 2>/dev/null || true
  done
  # What is still mounted there are folders of this system.
  if grep -q " $system/" /proc/mounts; then
    say "left $system: something in it is in use"
  else
    rm -rf "$system"
  fi
}
trap leave EXIT
say() { printf 'try_wheel: %s\n' "$*"; }
timed() {
  local began=$SECONDS name="$1"
  shift
  "$@"
  say "$((SECONDS - began)) s: $name"
}

make_system() {
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates \
    "$suite" "$system" "$mirror" >/dev/null
}
timed "an empty Debian ($suite)" make_system
mount -t proc proc "$system/proc"
for folder in ${MOE_TRY_FOLDERS:-}; do
  mkdir -p "$system$folder"
  mount --bind -o ro "$folder" "$system$folder"
done
# Never through a link of the new system, which would lead to a file of this one.
for file in /etc/resolv.conf /etc/hosts /etc/pip.conf /etc/xdg/pip/* /etc/ssl/certs/ca-certificates.crt; do
  if [ -f "$file" ]; then
    mkdir -p "$system$(dirname "$file")"
    cp -L --remove-destination "$file" "$system$file"
  fi
done
cp "$wheel" "$root/utils/first_result.py" "$system/tmp/"
inside() { env -u PYTHONPATH -u VIRTUAL_ENV HOME=/tmp chroot "$system" "$@"; }
say "$(inside python3 --version), $(inside ldd --version 2>&1 | head -1)"
timed "python3 -m venv" inside python3 -m venv /tmp/venv
timed "pip install $(basename "$wheel") $*" \
  inside /tmp/venv/bin/pip install --quiet --no-cache-dir "/tmp/$(basename "$wheel")" "$@"
inside /tmp/venv/bin/pip list 2>/dev/null | grep -E '^(moe|nanobind|numpy|torch|transformers)'
timed "the first tokens" inside /tmp/venv/bin/python /tmp/first_result.py
timed "moe doctor" inside /tmp/venv/bin/moe doctor
inside /tmp/venv/bin/moe-opt --version | head -2
