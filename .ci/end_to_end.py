"""The newcomer's walk: `baton up`, the curl line it prints, golden tokens, Ctrl-C.

Usage: end_to_end.py PATH_OF_BATON. Standard library only. Every wait has a bound.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

READY_S = 300  # includes the model's first download
ANSWER_S = 120
STOP_S = 20
# Below this margin between the best two logits, two correct f32 implementations may part.
MARGIN = 0.005
GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden" / "smollm2-135m-q4_1.json"


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def descendants(pid):
    """Processes below `pid`, by the kernel's own list."""
    found, open_ = [], [pid]
    while open_:
        parent = open_.pop()
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                pids = [int(p) for p in children.read_text().split()]
            except OSError:
                continue
            found += pids
            open_ += pids
    return found


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def post(port, path, body):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
        return json.load(response)


class Up:
    """One `baton up`; leaving the block ends it by Ctrl-C and checks that nothing is left."""

    def __init__(self, baton, *options):
        self.port = free_port()
        self.log = tempfile.NamedTemporaryFile(prefix="baton-up-", suffix=".log")
        command = [baton, "up", "--http-port", str(self.port), "--grpc-port", str(free_port()), *options]
        print("$", " ".join(command), flush=True)
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT)

    def __enter__(self):
        try:
            self.wait_ready()
        except BaseException:
            self.process.kill()
            print(self.output())
            raise
        return self

    def output(self):
        return Path(self.log.name).read_text(errors="replace")

    def wait_ready(self):
        end = time.monotonic() + READY_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise SystemExit(f"baton up ended with {self.process.returncode} before it was ready")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as response:
                    if response.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.1)
        raise SystemExit(f"baton up was not ready within {READY_S} s")

    def curl_line(self):
        """The curl command that `up` prints for pasting, continuation lines joined."""
        end = time.monotonic() + 10
        while time.monotonic() < end:
            lines = self.output().replace("\\\n", " ").splitlines()
            found = [line.strip() for line in lines if line.strip().startswith("curl ")]
            if found:
                return found[-1]
            time.sleep(0.1)
        raise SystemExit("baton up printed no curl line")

    def __exit__(self, kind, *_):
        below = descendants(self.process.pid)
        if kind is None:
            assert len(below) >= 3, f"expected router and two workers below baton up, found {below}"
        self.process.send_signal(signal.SIGINT)
        try:
            status = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = f"still running {STOP_S} s after Ctrl-C"
        time.sleep(0.2)
        left = [pid for pid in below if alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        if kind is not None or status != 0 or left:
            print(self.output())
        if kind is None:
            assert status == 0, f"baton up after Ctrl-C: {status}"
            assert not left, f"left behind by baton up: {left}"
            print(f"Ctrl-C: ended with 0, none of its {len(below)} processes is left")


def check_chat(up):
    line = up.curl_line()
    print("$", line, flush=True)
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=ANSWER_S)
    assert done.returncode == 0, done
    if "data: " in done.stdout:
        events = [e[6:] for e in done.stdout.splitlines() if e.startswith("data: ") and e != "data: [DONE]"]
        parts = [c["delta"].get("content") or "" for e in events for c in json.loads(e)["choices"]]
        text = "".join(parts)
    else:
        text = json.loads(done.stdout)["choices"][0]["message"]["content"]
    assert text.strip(), f"empty answer: {done.stdout}"
    print("answer:", text.strip().replace("\n", " ")[:200])


def check_golden(up, names):
    prompts = {p["name"]: p for p in json.loads(GOLDEN.read_text())["prompts"]}
    for name in names:
        golden = prompts[name]
        body = {
            "model": "default",
            "prompt": golden["prompt_tokens"],
            "max_tokens": len(golden["greedy_tokens"]),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        got = post(up.port, "/v1/completions", body)["choices"][0]["token_ids"]
        margins = golden["top2_margins"]
        sure = next((i for i, m in enumerate(margins) if m < MARGIN), len(margins))
        assert len(got) == len(margins), f"{name}: {len(got)} tokens instead of {len(margins)}"
        assert got[:sure] == golden["greedy_tokens"][:sure], f"{name}: {got} instead of {golden['greedy_tokens']}"
        print(f"golden: {name}: {sure} of {len(got)} tokens compared, all equal")


def main():
    baton = sys.argv[1]
    subprocess.run([baton, "--version"], check=True)
    with Up(baton) as up:
        check_chat(up)
    with Up(baton, "--precision", "f32", "--kv-dtype", "f32") as up:
        check_golden(up, ["raw-short", "chat-poem", "sixteen-multiple"])


main()
