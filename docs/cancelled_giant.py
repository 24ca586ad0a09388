#!/usr/bin/env python3
"""TTFT of a short prompt, idle and right after a prompt of 100,000 tokens was cancelled in its prefill.

Beside it runs `baton up --model builtin:tiny`; the argument is its HTTP port (8080). Takes about 40 s and ends by itself.
"""

import http.client
import json
import random
import statistics
import sys
import time

PORT = int(sys.argv[1]) if len(sys.argv) > 1 else 8080
ROUNDS = 15
# Prompts that no run before has left in a prefix cache.
numbers = random.Random(time.time_ns())


def prompt(num_tokens):
    return [numbers.randrange(0x20, 0x7F) for _ in range(num_tokens)]


def ask(num_tokens):
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
    body = {"prompt": prompt(num_tokens), "max_tokens": 4, "temperature": 0, "stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    return connection


def ttft_ms():
    start = time.perf_counter()
    connection = ask(20)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    response.read1(65536)
    took = (time.perf_counter() - start) * 1e3
    response.read()
    connection.close()
    return took


for _ in range(5):
    ttft_ms()
idle, after = [], []
for _ in range(ROUNDS):
    # As long a pause before either: after a second of it cores and caches are colder for both.
    time.sleep(0.5 + 1.5 * numbers.random())
    idle.append(ttft_ms())
    giant = ask(100_000)
    time.sleep(0.5 + 1.5 * numbers.random())
    giant.close()
    after.append(ttft_ms())
for name, times in (("idle", idle), ("after the cancel", after)):
    print(f"{name}: median {statistics.median(times):.1f} ms, {min(times):.1f} to {max(times):.1f}")
print(f"ratio of the medians: {statistics.median(after) / statistics.median(idle):.2f}")
