#!/usr/bin/env python3
"""What tracing every request costs: CPU time and throughput with it, over those without.

    cargo build --release --locked
    python3 docs/tracing_cost.py                       # the default model, answers longer than prompts: four minutes
    python3 docs/tracing_cost.py --model builtin:tiny  # next to no computing: what is left is mostly what tracing adds to

Two clusters of `baton up` stand side by side on the same two CPUs, and one of them sends every span to a collector in this script, which
throws them away. Both get the same short loads in turn, in blocks of four: without, with, with, without, and the other way round in
the next block, so that what drifts on the machine falls on both alike. A block gives one ratio. Which memory a process happens to get
makes a difference too, so after --blocks blocks both clusters are started anew. What is printed is the median of the ratios of all blocks and
its 95 % interval: a bootstrap that draws rounds, and blocks within each.

CPU time is that of router, prefill worker and decode worker together, read from the kernel's clock of each process, until the last span is
out. It is the surer figure: throughput also has the turns that threads wait for. Nothing else should run meanwhile.
"""

import argparse
import json
import os
import pathlib
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

# Spans wait for others for a second before they go out.
SETTLE_S = 1.3
READY_S = 120
RESAMPLES = 4_000
# Requests of a load, users at once, tokens of a prompt and of an answer: some three seconds each.
LOADS = {"builtin:tiny": (600, 8, 64, 64)}
USUAL_LOAD = (16, 8, 64, 128)
OFF, ON = "off", "on"


class Sink:
    """Takes exports and counts them, with as little computing as can be: it shares CPUs with what is measured."""

    ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n"

    def __init__(self, cpu):
        self.num_exports = 0
        self.cpu = cpu
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        # Of this thread and those it starts.
        os.sched_setaffinity(0, {self.cpu})
        while True:
            connection, _ = self.listener.accept()
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection):
        with connection:
            buffer = bytearray()
            while piece := connection.recv(1 << 20):
                buffer += piece
                while (head := buffer.find(b"\r\n\r\n")) >= 0:
                    fields = bytes(buffer[:head]).lower().split(b"\r\n")
                    (length,) = (int(field[15:]) for field in fields if field.startswith(b"content-length:"))
                    if len(buffer) < head + 4 + length:
                        break
                    del buffer[: head + 4 + length]
                    self.num_exports += 1
                    connection.sendall(self.ANSWER)


class Cluster:
    """`baton up`, and the CPU time of its children."""

    def __init__(self, options, http_port, environment, log):
        self.url = f"http://127.0.0.1:{http_port}"
        command = [options.baton, "up", "--model", options.model, "--cpus", options.cpus]
        command += ["--http-port", http_port, "--grpc-port", http_port + 1]
        self.log = log
        with open(log, "w") as out:
            self.process = subprocess.Popen(
                [str(part) for part in command], env={**os.environ, **environment}, stdout=out, stderr=out
            )

    def wait_until_ready(self):
        end = time.monotonic() + READY_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=1) as answer:
                    if answer.status == 200:
                        self.children = self.find_children()
                        return
            except OSError:
                pass
            time.sleep(0.2)
        sys.exit(f"no cluster within {READY_S} s:\n{self.log.read_text()[-2000:]}")

    def find_children(self):
        found = []
        for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
            try:
                pid, rest = int(stat.parent.name), stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(rest[1]) == self.process.pid:
                found.append(pid)
        return found

    def cpu_s(self):
        """User and system time of all threads, those that ended too: Linux's clock of a process has this number."""
        return sum(time.clock_gettime((~pid << 3) | 2) for pid in self.children)

    def spans(self):
        """Exported, and dropped or failed."""
        counts = {"exported": 0.0, "lost": 0.0}
        with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
            workers = json.load(answer)["workers"]
        addresses = [worker["address"].removeprefix("http://") for worker in workers]
        for url in [self.url] + [f"http://{address}" for address in addresses]:
            with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
                for line in answer.read().decode().splitlines():
                    if line.startswith("baton_spans_exported_total"):
                        counts["exported"] += float(line.split()[-1])
                    elif line.startswith("baton_spans_dropped_total"):
                        counts["lost"] += float(line.split()[-1])
        return counts

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
    bind = lambda: os.sched_setaffinity(0, {options.beside})
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, preexec_fn=bind)
    if done.returncode != 0:
        sys.exit(f"baton bench failed:\n{done.stdout}{done.stderr}")
    report = json.loads(done.stdout)
    if report["errors"]:
        sys.exit(f"requests failed: {report['errors']}")
    time.sleep(SETTLE_S)
    return report["output_tokens_per_s"], (cluster.cpu_s() - before) / options.requests


def block(options, clusters, nth):
    """Both with the same four loads; (tokens/s, CPU seconds a request) of each."""
    order = (OFF, ON, ON, OFF) if nth % 2 == 0 else (ON, OFF, OFF, ON)
    found = {OFF: [], ON: []}
    for at, name in enumerate(order):
        found[name].append(load(options, clusters[name], 2 * nth + at // 2))
    means = {name: tuple(statistics.mean(run[of] for run in runs) for of in (0, 1)) for name, runs in found.items()}
    (tokens_off, cpu_off), (tokens_on, cpu_on) = means[OFF], means[ON]
    print(
        f"  {tokens_off:.1f} tokens/s without, {tokens_on:.1f} with; "
        f"{1e3 * cpu_off:.2f} ms of CPU a request without, {1e3 * cpu_on:.2f} with",
        flush=True,
    )
    return {"tokens": tokens_on / tokens_off, "cpu": cpu_on / cpu_off, "more_us": 1e6 * (cpu_on - cpu_off)}


def one_round(options, nth, folder, sink, end):
    """The blocks of two fresh clusters."""
    tracing = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{sink.port}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    }
    environments = {OFF: {"OTEL_SDK_DISABLED": "true"}, ON: tracing}
    names = (OFF, ON) if nth % 2 == 0 else (ON, OFF)
    clusters = {}
    print(f"round {nth + 1}", flush=True)
    try:
        for at, name in enumerate(names):
            log = pathlib.Path(folder) / f"{name}.log"
            clusters[name] = Cluster(options, options.port + 2 * at, environments[name], log)
            clusters[name].wait_until_ready()
        for name in names:
            load(options, clusters[name], 10_000)
        blocks = []
        for at in range(options.blocks):
            # A round that began gives one block at least.
            if at > 0 and time.monotonic() > end:
                break
            blocks.append(block(options, clusters, nth * options.blocks + at))
        spans = clusters[ON].spans()
        num_requests = (2 * len(blocks) + 1) * options.requests
        print(f"  {spans['exported'] / num_requests:.1f} spans a request, {spans['lost']:.0f} lost")
        return blocks
    finally:
        for cluster in clusters.values():
            cluster.stop()


def interval(rounds, of):
    """The median, and its 95 % interval."""
    draw = random.Random(1)
    medians = []
    for _ in range(RESAMPLES):
        drawn = [one for blocks in draw.choices(rounds, k=len(rounds)) for one in draw.choices(blocks, k=len(blocks))]
        medians.append(statistics.median(one[of] for one in drawn))
    medians.sort()
    middle = statistics.median(one[of] for blocks in rounds for one in blocks)
    return middle, medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]


def show(name, rounds, of):
    middle, low, high = (100 * (value - 1) for value in interval(rounds, of))
    by_round = ", ".join(f"{100 * (statistics.median(one[of] for one in blocks) - 1):+.1f}" for blocks in rounds)
    print(f"{name}: {middle:+.2f} % ({low:+.2f} to {high:+.2f}); rounds: {by_round}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baton", default="target/release/baton", help="the program [%(default)s]")
    parser.add_argument("--model", default="default", help="as `baton up` takes it [%(default)s]")
    parser.add_argument("--minutes", type=float, default=4, help="no round or block begins later [%(default)s]")
    parser.add_argument("--blocks", type=int, default=2, help="until the clusters are started anew [%(default)s]")
    parser.add_argument("--cpus", default="0,1", help="of both clusters; the last one of them has the load too [%(default)s]")
    parser.add_argument("--requests", type=int, help="of each load [by model]")
    parser.add_argument("--concurrency", type=int, help="[by model]")
    parser.add_argument("--prompt", type=int, help="tokens [by model]")
    parser.add_argument("--output", type=int, help="tokens [by model]")
    parser.add_argument("--port", type=int, default=18080, help="four from here on are used [%(default)s]")
    options = parser.parse_args()
    usual = LOADS.get(options.model, USUAL_LOAD)
    for name, value in zip(("requests", "concurrency", "prompt", "output"), usual):
        if getattr(options, name) is None:
            setattr(options, name, value)
    # The decode worker has the first CPU; the load shares the other one with the prefill worker and the router.
    options.beside = int(options.cpus.split(",")[-1])
    sink = Sink(options.beside)
    rounds, end = [], time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < end:
            rounds.append(one_round(options, len(rounds), folder, sink, end))
    if sink.num_exports == 0:
        sys.exit("no span came: nothing was measured")
    num_blocks = sum(len(blocks) for blocks in rounds)
    print(
        f"{num_blocks} blocks in {len(rounds)} rounds, each load {options.requests} requests of {options.prompt} + {options.output} "
        f"tokens, {options.concurrency} at once, {options.model}"
    )
    show("throughput with tracing", rounds, "tokens")
    show("CPU time with tracing", rounds, "cpu")
    more_us, low, high = interval(rounds, "more_us")
    print(f"CPU time that a traced request takes more: {more_us:.0f} us ({low:.0f} to {high:.0f})")


main()
