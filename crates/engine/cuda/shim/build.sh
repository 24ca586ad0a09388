#!/bin/sh
# build.sh OUT.so [g++ flags]: the kernels for a CPU, as a library. KERNELS may name another folder with kernels (the tests' planted faults).
set -eu
out=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
kernels=${KERNELS:-$here/../kernels}
unit=$out.cpp
{
    for header in fiber.h device.h launch.h; do echo "#include \"$here/$header\""; done
    for file in $(cat "$here/../order"); do
        [ "$file" = device.cu ] || echo "#include \"$kernels/$file\""
    done
    for file in "$here"/../peer/*.cu; do echo "#include \"$file\""; done
} >"$unit"
# Contraction off: a product and a sum round twice unless a kernel says `fused`.
${CXX:-g++} -std=c++17 -x c++ -O1 -fno-gnu-unique -ffp-contract=off -fPIC -shared -fvisibility=hidden -Wall -Wextra -Wno-unknown-pragmas -Werror "$@" "$unit" -o "$out.part"
mv "$out.part" "$out"
rm -f "$unit"
