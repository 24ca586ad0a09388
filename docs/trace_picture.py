#!/usr/bin/env python3
"""Draws one trace as an SVG, with the critical path as Jaeger's page computes it.

python3 docs/trace_picture.py trace.json [TRACE_ID] > docs/trace.svg

Reads OTLP in JSON: what `baton trace export` writes, or files of `--trace-file`. Without an id the trace with the longest
`kv.wait` is drawn.
"""

import json
import sys
from html import escape

COLOURS = {"baton-router": "#4c78a8", "baton-prefill-worker": "#e08a2e", "baton-decode-worker": "#4aa36f"}
WIDTH, LABELS, ROW = 1000, 250, 22
PRODUCER, CONSUMER = 4, 5
KINDS = {2: "server", 3: "client", PRODUCER: "producer", CONSUMER: "consumer"}


class Span:
    def __init__(self, told, service):
        self.id, self.parent, self.trace = told["spanId"], told.get("parentSpanId", ""), told["traceId"]
        self.name, self.kind, self.service = told["name"], told.get("kind", 1), service
        if isinstance(self.kind, str):
            self.kind = {"SPAN_KIND_PRODUCER": PRODUCER, "SPAN_KIND_CONSUMER": CONSUMER, "SPAN_KIND_SERVER": 2,
                         "SPAN_KIND_CLIENT": 3}.get(self.kind, 1)
        self.start, self.end = int(told["startTimeUnixNano"]), int(told["endTimeUnixNano"])


def read(path):
    """Spans by trace id."""
    traces = {}
    with open(path, encoding="utf-8") as file:
        for line in filter(str.strip, file):
            for process in json.loads(line)["resourceSpans"]:
                attributes = {a["key"]: a["value"].get("stringValue", "") for a in process["resource"]["attributes"]}
                for scope in process["scopeSpans"]:
                    for told in scope["spans"]:
                        span = Span(told, attributes["service.name"])
                        traces.setdefault(span.trace, []).append(span)
    return traces


def tree(spans):
    """The root, and children by parent's id, earliest first."""
    ids = {span.id for span in spans}
    (root,) = [span for span in spans if span.parent not in ids]
    children = {}
    for span in sorted(spans, key=lambda span: span.start):
        children.setdefault(span.parent, []).append(span)
    return root, children


def critical_path(root, children):
    """(span, start, end), latest first: from the child that ends last to what ended before that began."""
    cuts = {}

    def cut(span, parent, start, end):
        cuts[span.id] = (span, parent, start, end)
        for child in children.get(span.id, []):
            blocks = (span.kind, child.kind) != (PRODUCER, CONSUMER)
            if blocks and child.start < end and child.end > start:
                cut(child, span.id, max(child.start, start), min(child.end, end))

    cut(root, None, root.start, root.end)
    path, at, until = [], root.id, None
    while at is not None:
        span, parent, start, end = cuts[at]
        end = end if until is None else until
        before = [c.id for c in children.get(at, []) if c.id in cuts and (until is None or cuts[c.id][3] < until)]
        last = max(before, key=lambda id: cuts[id][3], default=None)
        path.append((span, start if last is None else cuts[last][3], end))
        at, until = (last, None) if last else (parent, start)
    return path


def draw(spans):
    root, children = tree(spans)
    rows = []

    def walk(span, depth):
        rows.append((span, depth))
        for child in children.get(span.id, []):
            walk(child, depth + 1)

    walk(root, 0)
    scale = (WIDTH - LABELS - 20) / (root.end - root.start)
    x = lambda ns: LABELS + (min(max(ns, root.start), root.end) - root.start) * scale
    height = ROW * (len(rows) + 2)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        "<style>text{fill:#222}.path{fill:#000}.back{fill:#fff}@media(prefers-color-scheme:dark)"
        "{text{fill:#ddd}.path{fill:#fff}.back{fill:#161b22}}</style>",
        f'<rect class="back" width="{WIDTH}" height="{height}"/>',
    ]
    y_of = {}
    for nth, (span, depth) in enumerate(rows):
        y = y_of[span.id] = ROW * nth + 8
        kind = KINDS.get(span.kind, "")
        colour = COLOURS.get(span.service, "#888")
        ms = (span.end - span.start) / 1e6
        out.append(f'<text x="{8 + 12 * depth}" y="{y + 12}">{escape(span.name)} <tspan opacity=".6">{kind}</tspan></text>')
        left, width = x(span.start), max(x(span.end) - x(span.start), 1.5)
        title = f"{span.service}: {span.name}, {ms:.2f} ms"
        out.append(f'<rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="14" rx="2" fill="{colour}"><title>{escape(title)}</title></rect>')
        beside = left + width + 4
        anchor, at = ("start", beside) if beside < WIDTH - 70 else ("end", left - 4)
        if at > LABELS:
            out.append(f'<text x="{at:.1f}" y="{y + 12}" text-anchor="{anchor}" font-size="10">{ms:.1f} ms</text>')
    for span, start, end in critical_path(root, children):
        width = max(x(end) - x(start), 0.5)
        out.append(f'<rect class="path" x="{x(start):.1f}" y="{y_of[span.id] + 10}" width="{width:.1f}" height="4"/>')
    left = 8
    for service, colour in COLOURS.items():
        out.append(f'<rect x="{left}" y="{height - 20}" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{left + 16}" y="{height - 10}">{service}</text>')
        left += 170
    out.append(f'<rect class="path" x="{left}" y="{height - 16}" width="24" height="4"/>')
    out.append(f'<text x="{left + 30}" y="{height - 10}">critical path</text></svg>')
    return "\n".join(out)


def main():
    traces = read(sys.argv[1])
    longest = lambda id: max((s.end - s.start for s in traces[id] if s.name == "kv.wait"), default=0)
    print(draw(traces[sys.argv[2] if len(sys.argv) > 2 else max(traces, key=longest)]))


main()
