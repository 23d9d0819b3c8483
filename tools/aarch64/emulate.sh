#!/usr/bin/env bash
# Runs a command among whose programs those for aarch64 are emulated, whichever program starts them.
#
#   tools/aarch64/emulate.sh COMMAND [ARGUMENT...]
#
# PAGE=65536 lets the emulated programs see pages of that size. The kernel hands their files to qemu because a name space
# of the user's own says so (since Linux 6.7, for which root is not needed); where the machine does so already, that is
# what happens. Ends with 3 and one sentence where neither can be.
set -euo pipefail
# shellcheck source=environment.sh
source "$(dirname "$0")/environment.sh"

# All addresses that the emulator gives out. It keeps account of them page by page, and the shared heap asks for twice the
# memory of the machine: qemu 7.2 takes seconds for some hundred GiB, and is killed for want of memory at a few TiB. That is
# where a program seems to stop, just before its first thread. More than this is refused at once, and there is no heap
# then. (Signals have no part in it: a thread that is started with all of them blocked runs under qemu 7.2.)
export QEMU_LD_PREFIX=$sysroot QEMU_RESERVED_VA=256G
[ -z "${PAGE:-}" ] || export QEMU_PAGESIZE=$PAGE
probe=$sysroot/usr/bin/dpkg-split

# Not with the page size: the machine's own emulator may be another one.
if [ -z "${PAGE:-}" ] && "$probe" --version >/dev/null 2>&1; then exec "$@"; fi

# The header of an ELF file of 64 bits, little endian, for the machine 183.
magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
# F: the emulator is opened now, so that it is found in whatever name space a program runs.
register=":aarch64:M::$magic:$mask:$(readlink -f "$(emulator)"):F"
# shellcheck disable=SC2016 # The shell inside expands it.
mount_and='mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc && \
  printf %s "$0" >/proc/sys/fs/binfmt_misc/register && exec "$@"'

# Replaces this process by the command, in the name space.
enter() {
  if [ "$(id -u)" -ne 0 ]; then
    exec unshare --user --map-current-user --keep-caps --mount sh -c "$mount_and" "$register" "$@"
  fi
  # All users are there under their own numbers, as tests that give files away ask. The numbers can only be told from
  # outside, and only who runs a program after that is root inside.
  local me=$BASHPID
  # No process waits for it: what becomes of this process has no children that it knows of.
  ({
    until [ "$(readlink "/proc/$me/ns/user")" != "$(readlink /proc/self/ns/user)" ]; do sleep 0.01; done
    for map in uid_map gid_map; do awk '{print $1, $1, $3}' "/proc/self/$map" >"/proc/$me/$map"; done
  } </dev/null >/dev/null 2>&1 &)
  # shellcheck disable=SC2016 # The shell inside expands it.
  exec unshare --user --mount sh -c 'until [ -n "$(cat /proc/self/gid_map)" ]; do sleep 0.01; done; exec sh -c "$@"' \
    sh "$mount_and" "$register" "$@"
}

if ! reason=$(enter "$probe" --version 2>&1); then
  echo "aarch64: programs cannot be emulated here, which needs Linux 6.7 and name spaces of users: ${reason##*$'\n'}" >&2
  exit 3
fi
enter "$@"
