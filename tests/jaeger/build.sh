#!/usr/bin/env bash
# Builds programs of this module: `build.sh FOLDER [jaeger|promlint]...`, both unless named. What was built from the same
# sources stays; Go's own cache keeps the packages, so that a fresh clone only links.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
cd "$here"

source_of() {
    go version
    find . -type f | LC_ALL=C sort | xargs cat
}

[ $# -gt 0 ] || set -- jaeger promlint
for name in "$@"; do
    case $name in
    jaeger) package=github.com/jaegertracing/jaeger/cmd/jaeger ;;
    promlint) package=./promlint ;;
    *) echo "no program is called $name" >&2 && exit 2 ;;
    esac
    stamp=$folder/$name.built-from
    if ! [ -x "$folder/$name" ] || ! source_of | cmp --silent - "$stamp"; then
        echo "building $name once, which may take minutes" >&2
        go build -mod=readonly -buildvcs=false -trimpath -gcflags=all=-dwarf=false -ldflags='-s -w' -o "$folder/$name" "$package"
        source_of >"$stamp"
    fi
done
