#!/bin/sh
# Links for an older glibc than this system's: zig has the symbols of every glibc, and is told which by UNISONO_LINK_TARGET
# (x86_64-linux-gnu.2.28). Called as the linker by rustc and as the C compiler by rust/capi/build.sh.
#
# The C++ runtime and the unwinder stay GNU's, as torch has them: zig would take its own instead. They are named by path,
# from the compiler CXX. Options that zig's front end does not know are left out: rustc exports by a version script in any
# case.
# Programs, which are cargo's build scripts, run here and now: CXX links them.
set -eu
case " $* " in
  *" -shared "*) ;;
  *) exec "$CXX" "$@" ;;
esac
for argument in "$@"; do
  shift
  case $argument in
    -lstdc++) argument=$("$CXX" -print-file-name=libstdc++.so.6) ;;
    -lgcc_s) argument=$("$CXX" -print-file-name=libgcc_s.so.1) ;;
    -Wl,--exclude-libs,ALL | -Wl,--no-undefined-version | -fuse-ld=lld | -B*/gcc-ld) continue ;;
  esac
  set -- "$@" "$argument"
done
exec "$ZIG" cc -target "$UNISONO_LINK_TARGET" "$@"
