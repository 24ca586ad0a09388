#!/usr/bin/env python3
"""Makes the trace of docs/trace.svg: one prompt whose KV outlasts its prefill. As root, for two network namespaces and `tbf`:

    cargo build --release --locked
    python3 docs/slow_link_trace.py > trace.json
    python3 docs/trace_picture.py trace.json > docs/trace.svg

Router and prefill worker stand on one end of a cable of 7 Mb/s, the decode worker on the other. `builtin:tiny` is paced to 2,048 prompt tokens a
second, so that 2,048 tokens take as long as with a larger model. What is printed is what `baton trace export` makes of the files of all three.
"""

import argparse
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

KILOBITS = 7_000
PROMPT, ANSWER = 2_048, 12
NEAR, FAR = "10.77.1.1", "10.77.1.2"
# Spans go out a second after they ended.
SETTLE_S = 2
READY_S = 60


def run(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: {done.stderr or done.stdout}")
    return done.stdout


class Cable:
    """Two namespaces and a shaped pair of interfaces between them."""

    def __init__(self, tag):
        self.near, self.far = f"baton-{tag}-near", f"baton-{tag}-far"

    def __enter__(self):
        for namespace in (self.near, self.far):
            run("ip", "netns", "add", namespace)
        run("ip", "-n", self.near, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", self.far)
        for namespace, address in ((self.near, NEAR), (self.far, FAR)):
            run("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", "cable")
            run("ip", "-n", namespace, "link", "set", "cable", "up")
            run("ip", "-n", namespace, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_):
        for namespace in (self.near, self.far):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)

    def shape(self):
        for namespace in (self.near, self.far):
            # The bucket holds 6 ms.
            shape = ["rate", f"{KILOBITS}kbit", "burst", f"{KILOBITS * 6 // 8}b", "latency", "200ms"]
            run("tc", "-n", namespace, "qdisc", "replace", "dev", "cable", "root", "tbf", *shape)


class Processes:
    def __init__(self, baton, folder):
        self.baton, self.folder, self.running = baton, folder, []

    def start(self, namespace, name, *arguments):
        log = open(self.folder / f"{name}.log", "w")
        command = ["ip", "netns", "exec", namespace, self.baton, name, "--trace-file", self.folder / f"{name}.jsonl", *arguments]
        self.running.append(subprocess.Popen([str(part) for part in command], stdout=log, stderr=log))

    def address(self, file):
        end = time.monotonic() + READY_S
        while time.monotonic() < end:
            if file.exists() and (text := file.read_text().strip()):
                return text
            time.sleep(0.05)
        sys.exit(f"{file.name}: no address within {READY_S} s")

    def stop(self):
        for process in reversed(self.running):
            process.send_signal(signal.SIGTERM)
        for process in self.running:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def ask(cable, http, num_prompt, num_tokens, first):
    prompt = [3 + (first + nth * 7919) % 250 for nth in range(num_prompt)]
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    url = f"http://{http}/v1/completions"
    return run("ip", "netns", "exec", cable.near, "curl", "-sS", "--fail-with-body", url, "-H", "content-type: application/json", "-d", json.dumps(body))


def wait_until_ready(cable, http):
    end = time.monotonic() + READY_S
    health = ["ip", "netns", "exec", cable.near, "curl", "-s", "--fail", "-o", "/dev/null", f"http://{http}/health"]
    while subprocess.run(health).returncode != 0:
        if time.monotonic() > end:
            sys.exit(f"not ready within {READY_S} s")
        time.sleep(0.1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baton", default="target/release/baton", help="the program [%(default)s]")
    baton = pathlib.Path(parser.parse_args().baton).resolve()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        processes = Processes(baton, folder)
        with Cable(folder.name[-6:]) as cable:
            try:
                # Both ends are on one host, where KV would not take the cable.
                worker = ["--model", "builtin:tiny", "--threads", 1, "--kv-transport", "grpc", "--insecure", "--address-file"]
                processes.start(cable.far, "decode-worker", "--listen", f"{FAR}:0", *worker, folder / "decode")
                paced = ["--pace-tokens-per-s", PROMPT, "--max-step-tokens", 256]
                processes.start(cable.near, "prefill-worker", "--listen", f"{NEAR}:0", *worker, folder / "prefill", *paced)
                workers = ["--prefill-worker", processes.address(folder / "prefill")]
                workers += ["--decode-worker", processes.address(folder / "decode")]
                listen = ["--http-listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0", "--http-address-file", folder / "http"]
                processes.start(cable.near, "router", "--model", "builtin:tiny", *listen, *workers)
                http = processes.address(folder / "http")
                wait_until_ready(cable, http)
                # Connections are made, and the whole cable is measured.
                ask(cable, http, 256, 2, 0)
                cable.shape()
                ask(cable, http, PROMPT, ANSWER, 1)
                time.sleep(SETTLE_S)
            finally:
                processes.stop()
        print(run(baton, "trace", "export", folder), end="")


main()
