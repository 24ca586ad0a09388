#!/usr/bin/env python3
"""Measures `baton bench engine` and llama.cpp side by side, and prints the table of docs/benchmarks.md.

    cargo build --release --locked
    python3 docs/beside_llama_cpp.py

The first run fetches the source of llama.cpp that llama-cpp-python 0.3.36 carries, builds it for this CPU (cmake, a C++
compiler, and ninja or make; ten minutes on two cores) and makes Q4_0, its fastest format on CPUs, of the same model. All that is kept in
--work. Then, in each of --rounds rounds, both programs measure every case in turn, with 1 and with 2 threads; the medians count.
In the first round llama.cpp runs each case with flash attention and without; the faster is kept for that case. Nothing else should
run meanwhile; it takes about eight minutes.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tarfile

VERSION = "0.3.36"
TARGETS = ["llama-bench", "llama-batched-bench", "llama-quantize"]
CASES = ["pp512", "pp2048", "tg1", "tg8", "tg32"]
FLOORS = {"pp512": 2.4, "pp2048": 2.4, "tg1": 1.8, "tg8": 2.7, "tg32": 2.5}
CONTEXT, STEPS = 128, 64


def run(command, **options):
    """The standard output of a command; its standard error is shown only if it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    if done.returncode != 0:
        sys.exit(f"{command[0]} failed ({done.returncode}):\n{done.stderr[-2000:]}")
    return done.stdout


def keep_tile_shapes(source):
    """GCC 12's `_tile_loadconfig` declares only the first bytes of what it reads, so the stores of the rest are dropped and the first
    product on AMX ends in a segmentation fault. A statement that may look at all of it keeps them."""
    path = source / "vendor" / "llama.cpp" / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp"
    text = path.read_text()
    call, seen = "    _tile_loadconfig(&tc);", '    asm volatile("" : : "r"(&tc) : "memory");\n'
    if call not in text:
        sys.exit(f"{path}: no tiles are set up where they were in {VERSION}")
    if seen not in text:
        path.write_text(text.replace(call, seen + call))


def build(work, jobs):
    """llama.cpp's programs, built once."""
    folder = work / "build"
    programs = {name: folder / "bin" / name for name in TARGETS}
    if all(program.exists() for program in programs.values()):
        return programs
    source = work / f"llama_cpp_python-{VERSION}"
    if not source.exists():
        print("fetching the source of llama.cpp ...", flush=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:", "--dest", work]
        run([*pip, f"llama-cpp-python=={VERSION}"])
        with tarfile.open(work / f"llama_cpp_python-{VERSION}.tar.gz") as archive:
            archive.extractall(work, filter="data")
    keep_tile_shapes(source)
    print("building llama.cpp for this CPU ...", flush=True)
    settings = {
        "CMAKE_BUILD_TYPE": "Release",
        "GGML_NATIVE": "ON",
        "BUILD_SHARED_LIBS": "OFF",
        "LLAMA_CURL": "OFF",
        "LLAMA_OPENSSL": "OFF",
        "LLAMA_BUILD_TESTS": "OFF",
        "LLAMA_BUILD_EXAMPLES": "OFF",
        "LLAMA_BUILD_SERVER": "OFF",
    }
    defines = [f"-D{name}={value}" for name, value in settings.items()]
    run(["cmake", "-S", source / "vendor" / "llama.cpp", "-B", folder, *defines])
    run(["cmake", "--build", folder, "-j", jobs, "--target", *TARGETS])
    return programs


def quantise(work, programs, model):
    """The model in Q4_0."""
    out = work / f"{model.stem}.Q4_0.gguf"
    if not out.exists():
        run([programs["llama-quantize"], "--allow-requantize", model, out, "Q4_0", "2"])
    return out


def ours(baton, model, threads):
    """Tokens per second by case, and the report they come from."""
    command = [baton, "bench", "engine", "--model", model, "--threads", threads, "--rounds", "1", "--json"]
    report = json.loads(run([*command, "--cases", ",".join(CASES)]))
    return {row["case"]: row["tokens_per_s"] for row in report["rows"]}, report


def theirs(programs, model, threads, case, flash):
    """Tokens per second of one case."""
    common = ["-m", model, "-t", threads, "-fa", "1" if flash else "0"]
    if case in ("tg8", "tg32"):
        sizes = ["-npp", CONTEXT, "-ntg", STEPS, "-npl", case[2:], "-pps", "-c", 8192]
        flags = ["-fa", "on" if flash else "off", "-m", model, "-t", threads, "-tb", threads, "--output-format", "jsonl"]
        lines = run([programs["llama-batched-bench"], *flags, *sizes]).splitlines()
        return next(json.loads(line)["speed_tg"] for line in lines if line.startswith("{"))
    if case == "tg1":
        sizes = ["-p", 0, "-n", STEPS, "-d", CONTEXT]
    else:
        # A prompt as a warm-up before a prompt that takes many seconds changes nothing but the time this takes.
        sizes = ["-p", case[2:], "-n", 0] + (["--no-warmup"] if case == "pp2048" else [])
    rows = json.loads(run([programs["llama-bench"], *common, "-r", 1, "-o", "json", *sizes]))
    return rows[0]["avg_ts"]


def measure(options, programs, q4_0):
    """All samples: `[program][threads][case]`, and which cases llama.cpp ran with flash attention."""
    samples = {name: {t: {case: [] for case in CASES} for t in options.threads} for name in ("baton", "llama.cpp")}
    flash, shares = {}, {}
    for nth in range(options.rounds):
        print(f"round {nth + 1} of {options.rounds}", file=sys.stderr, flush=True)
        for threads in options.threads:
            speeds, report = ours(options.baton, options.model, threads)
            shares.setdefault(threads, []).append(report)
            for case in CASES:
                samples["baton"][threads][case].append(speeds[case])
                both = {f: theirs(programs, q4_0, threads, case, f) for f in flash.get((threads, case), (False, True))}
                best = max(both, key=both.get)
                flash.setdefault((threads, case), (best,))
                samples["llama.cpp"][threads][case].append(both[best])
    return samples, flash, shares


def table(options, samples, flash):
    print(f"| SmolLM2-135M, tokens a second | threads | baton | llama.cpp Q4_0 | flash attention | ratio | floor |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for threads in options.threads:
        for case in CASES:
            mine, other = (samples[name][threads][case] for name in ("baton", "llama.cpp"))
            ratio = statistics.median(a / b for a, b in zip(mine, other))
            print(
                f"| {case} | {threads} | {shown(mine)} | {shown(other)} | {'on' if flash[threads, case][0] else 'off'} "
                f"| {ratio:.2f} | {FLOORS[case]} |"
            )
    if {1, 2} <= set(options.threads):
        for case in ("pp512", "pp2048"):
            for name in ("baton", "llama.cpp"):
                both = zip(samples[name][2][case], samples[name][1][case])
                print(f"\n{name}, {case}: 2 threads are {statistics.median(a / b for a, b in both):.2f} times one", end="")
        print()


def shown(values):
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def main():
    cache = pathlib.Path(os.environ.get("BATON_CACHE") or pathlib.Path.home() / ".cache" / "baton")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--baton", type=pathlib.Path, default=pathlib.Path("target/release/baton"))
    parser.add_argument("--model", type=pathlib.Path, default=cache / "SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--work", type=pathlib.Path, default=cache / "beside-llama.cpp", help="where llama.cpp is built")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=lambda text: [int(t) for t in text.split(",")], default=[1, 2])
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at once")
    parser.add_argument("--json", type=pathlib.Path, help="file for all samples")
    options = parser.parse_args()
    if not options.model.exists():
        sys.exit(f"{options.model} is missing: `{options.baton} bench engine --rounds 1` fetches the default model")
    options.work.mkdir(parents=True, exist_ok=True)
    programs = build(options.work, options.jobs)
    q4_0 = quantise(options.work, programs, options.model)
    samples, flash, reports = measure(options, programs, q4_0)
    table(options, samples, flash)
    if options.json:
        kept = {f"{case}, {t} threads": f[0] for (t, case), f in flash.items()}
        options.json.write_text(json.dumps({"samples": samples, "flash": kept, "reports": reports}, indent=1))


if __name__ == "__main__":
    main()
