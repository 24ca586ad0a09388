#!/usr/bin/env python3
"""Compiles the CUDA kernels: build.py [--check] [CUDA_HOME]

The toolchain is nvcc 13.0 (VERSIONS below, all from wheels); CUDA_HOME, or the variable of that name, is the folder that holds bin/nvcc. What is made is committed: built/baton.fatbin (sm_80, sm_90, PTX of compute_80),
built/SHA256SUMS (of every source and of the module) and built/resources.txt (registers, spills and stack of every kernel); the same for the module of peer/ in built/peer. `--check`
makes them in a temporary folder and compares.
"""

import hashlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile

VERSIONS = ["nvidia-cuda-nvcc==13.0.88", "nvidia-cuda-crt==13.0.88", "nvidia-nvvm==13.0.88", "nvidia-cuda-runtime==13.0.96", "nvidia-cuda-cccl==13.0.85"]
RELEASE = "V13.0.88"
ARCHITECTURES = [80, 90]
HERE = pathlib.Path(__file__).resolve().parent
MADE = ["baton.fatbin", "SHA256SUMS", "resources.txt", "peer/peer.fatbin", "peer/SHA256SUMS", "peer/resources.txt"]


class Unit:
    """One module: its sources in order, the file that names them if there is one, and where what is made of them lies."""

    def __init__(self, name, sources, named_by, folder):
        self.name, self.named_by, self.folder = name, named_by, folder
        self.sources = [HERE / source for source in sources]


def units():
    kernels = [f"kernels/{name}" for name in (HERE / "order").read_text().split()]
    return [
        Unit("baton", kernels, ["order"], "."),
        Unit("peer", ["kernels/device.cu", "kernels/numbers.cu", "peer/rings.cu"], [], "peer"),
    ]


def nvcc(cuda_home):
    path = pathlib.Path(cuda_home) / "bin" / "nvcc"
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    if RELEASE not in version:
        sys.exit(f"{path} is not {RELEASE}: pip install --no-deps --target FOLDER {' '.join(VERSIONS)}; CUDA_HOME=FOLDER/nvidia/cu13")
    return path


def compile_to(out, unit, cuda_home, work):
    # One unit with names of files but no folders, so that the module doesn't depend on where it is made.
    text = "".join(f'#line 1 "{source.name}"\n{source.read_text()}' for source in unit.sources)
    (work / f"{unit.name}.cu").write_text(text)
    command = [nvcc(cuda_home), "-std=c++17", "-O3", "-fatbin", "-Xptxas", "-v,-warn-spills", "-Xfatbin", "-compress-all"]
    for arch in ARCHITECTURES:
        command += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
    command += ["-gencode", "arch=compute_80,code=compute_80", "-o", f"{unit.name}.fatbin", f"{unit.name}.cu"]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)
    (out / f"{unit.name}.fatbin").write_bytes((work / f"{unit.name}.fatbin").read_bytes())
    return done.stdout + done.stderr


def resources(log):
    """One line a kernel and architecture, from what ptxas reports."""
    lines, kernel = {}, None
    for line in log.splitlines():
        if found := re.search(r"Compiling entry function '(\w+)' for 'sm_(\d+)'", line):
            kernel = (found[1], int(found[2]))
        elif found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stack, stores, loads = map(int, found.groups())
            lines[kernel] = f"stack {stack} spills {stores + loads}"
        elif found := re.search(r"Used (\d+) registers", line):
            lines[kernel] += f" registers {found[1]}"
    return "".join(f"{name} sm_{arch} {rest}\n" for (name, arch), rest in sorted(lines.items()))


def digests(out, unit):
    def line(path, name):
        return f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n"

    named = [HERE / name for name in unit.named_by]
    text = "".join(line(path, path.relative_to(HERE).as_posix()) for path in unit.sources + named)
    module = f"{unit.name}.fatbin"
    return text + line(out / module, (pathlib.PurePath("built") / unit.folder / module).as_posix())


def make(built, cuda_home):
    for unit in units():
        out = built / unit.folder
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as work:
            log = compile_to(out, unit, cuda_home, pathlib.Path(work))
        (out / "resources.txt").write_text(resources(log))
        (out / "SHA256SUMS").write_text(digests(out, unit))


def main():
    arguments = sys.argv[1:]
    check = "--check" in arguments
    homes = [a for a in arguments if a != "--check"] or [os.environ.get("CUDA_HOME", "/usr/local/cuda")]
    built = HERE / "built"
    if not check:
        make(built, homes[0])
        print("".join((built / unit.folder / "resources.txt").read_text() for unit in units()), end="")
        return
    with tempfile.TemporaryDirectory() as fresh:
        make(pathlib.Path(fresh), homes[0])
        for name in MADE:
            if (built / name).read_bytes() != (pathlib.Path(fresh) / name).read_bytes():
                sys.exit(f"built/{name} is not what the sources give: run build.py")


main()
