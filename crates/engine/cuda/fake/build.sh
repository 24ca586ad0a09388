#!/bin/sh
# build.sh FOLDER [g++ flags]: a driver, cuBLASLt and the kernels for a machine without a card, to be put on LD_LIBRARY_PATH. They are for tests.
set -eu
out=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"
flags="-std=c++17 -O3 -fPIC -shared -Wall -Wextra -Werror"
# Under the names that are looked for first, so that a driver that is installed is not found before them.
${CXX:-g++} $flags "$here/driver.cpp" "$here/graph.cpp" "$here/ipc.cpp" -Wl,-soname,libcuda.so -ldl -o "$out/libcuda.so"
${CXX:-g++} $flags "$here/blas.cpp" -Wl,-soname,libcublasLt.so "$out/libcuda.so" -o "$out/libcublasLt.so"
"$here/../shim/build.sh" "$out/libbaton_kernels.so" "$@"
