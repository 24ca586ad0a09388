#!/usr/bin/env python3
"""What tracing every request costs: throughput and CPU time with it, over those without, in turn.

    cargo build --release --locked
    python3 docs/tracing_cost.py                       # the default model: about four minutes
    python3 docs/tracing_cost.py --model builtin:tiny  # next to no computing: what is left is mostly what tracing adds to

Two clusters of `baton up` stand side by side, and one of them sends every span to a collector in this script, which throws them away.
In each of --pairs pairs both get the same requests, one after the other, with the order turned from pair to pair, so that what drifts
on the machine falls on both. A ratio is taken within each pair; what is printed is the median of the ratios with its 95 % confidence
interval (bootstrap over pairs, percentiles). CPU time is that of router, prefill worker and decode worker together, until the last
span is out. Nothing else should run meanwhile.
"""

import argparse
import http.server
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

# Spans wait for others for a second before they go out.
SETTLE_S = 1.5
READY_S = 120
RESAMPLES = 10_000


class Sink(http.server.BaseHTTPRequestHandler):
    """Takes exports, and counts them."""

    num_exports = 0
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        Sink.num_exports += 1
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


class Cluster:
    """`baton up`, and the CPU time of its children."""

    def __init__(self, options, http_port, environment, log):
        self.url = f"http://127.0.0.1:{http_port}"
        command = [options.baton, "up", "--model", options.model, "--http-port", http_port, "--grpc-port", http_port + 1]
        command = [str(part) for part in command]
        self.log = log
        with open(log, "w") as out:
            self.process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=out, stderr=out)

    def wait_until_ready(self):
        end = time.monotonic() + READY_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=1) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                pass
            time.sleep(0.2)
        sys.exit(f"no cluster within {READY_S} s:\n{self.log.read_text()[-2000:]}")

    def children(self):
        found = []
        for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == self.process.pid:
                found.append(fields)
        return found

    def cpu_s(self):
        """User and system time of all threads, those that ended too."""
        ticks = sum(int(fields[11]) + int(fields[12]) for fields in self.children())
        return ticks / os.sysconf("SC_CLK_TCK")

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def load(options, cluster, seed):
    """Output tokens per second, and CPU seconds per request."""
    before = cluster.cpu_s()
    command = [options.baton, "bench", "--json", "--url", cluster.url, "--seed", seed, "--requests", options.requests]
    command += ["--concurrency", options.concurrency, "--prompt-tokens", options.prompt, "--output-tokens", options.output]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"baton bench failed:\n{done.stdout}{done.stderr}")
    report = json.loads(done.stdout)
    if report["errors"]:
        sys.exit(f"requests failed: {report['errors']}")
    time.sleep(SETTLE_S)
    return report["output_tokens_per_s"], (cluster.cpu_s() - before) / options.requests


def interval(ratios):
    """The median, and its 95 % confidence interval."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return statistics.median(ratios), medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]


def show(name, off, on):
    middle, low, high = interval([b / a for a, b in zip(off, on)])
    print(f"{name}: {100 * (middle - 1):+.2f} % ({100 * (low - 1):+.2f} to {100 * (high - 1):+.2f})")


def measure(options, off, on):
    results = {"off": [], "on": []}
    for cluster in (off, on):
        load(options, cluster, 10_000)
    for nth in range(options.pairs):
        order = [("off", off), ("on", on)]
        for name, cluster in order if nth % 2 == 0 else reversed(order):
            results[name].append(load(options, cluster, nth))
        (tokens_off, cpu_off), (tokens_on, cpu_on) = results["off"][-1], results["on"][-1]
        print(
            f"pair {nth + 1}: {tokens_off:.1f} tokens/s without, {tokens_on:.1f} with; "
            f"{1e3 * cpu_off:.2f} ms of CPU a request without, {1e3 * cpu_on:.2f} with",
            flush=True,
        )
    tokens, cpu = ([[run[at] for run in results[name]] for name in ("off", "on")] for at in (0, 1))
    print(f"{options.pairs} pairs of {options.requests} requests, {options.concurrency} at once, {options.model}")
    show("throughput with tracing", *tokens)
    show("CPU time with tracing", *cpu)
    more_us = statistics.median(1e6 * (b - a) for a, b in zip(*cpu))
    print(f"CPU time that a traced request takes more: {more_us:.0f} us (median of the differences)")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baton", default="target/release/baton", help="the program [%(default)s]")
    parser.add_argument("--model", default="default", help="as `baton up` takes it [%(default)s]")
    parser.add_argument("--pairs", type=int, default=12, help="[%(default)s]")
    parser.add_argument("--requests", type=int, default=16, help="in each half of a pair [%(default)s]")
    parser.add_argument("--concurrency", type=int, default=8, help="[%(default)s]")
    parser.add_argument("--prompt", type=int, default=128, help="tokens [%(default)s]")
    parser.add_argument("--output", type=int, default=64, help="tokens [%(default)s]")
    parser.add_argument("--port", type=int, default=18080, help="four from here on are used [%(default)s]")
    options = parser.parse_args()
    sink = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sink)
    threading.Thread(target=sink.serve_forever, daemon=True).start()
    tracing = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{sink.server_port}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    }
    with tempfile.TemporaryDirectory() as folder:
        logs = [pathlib.Path(folder) / name for name in ("off.log", "on.log")]
        off = Cluster(options, options.port, {"OTEL_SDK_DISABLED": "true"}, logs[0])
        on = Cluster(options, options.port + 2, tracing, logs[1])
        try:
            off.wait_until_ready()
            on.wait_until_ready()
            measure(options, off, on)
            if Sink.num_exports == 0:
                sys.exit("no span came: nothing was measured")
        finally:
            off.stop()
            on.stop()


main()
