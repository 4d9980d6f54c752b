#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""loss_curves.py - the losses of trainings as a picture (SVG): means of ten steps

    train_gpt --optimizer adamw --csv adamw.csv ...; train_gpt --optimizer muon --csv muon.csv ...
    python3 bench/loss_curves.py -o docs/loss_curves.svg AdamW=adamw.csv Muon=muon.csv

The files are those of train_gpt --csv, or, if their names end in .json, of train_llama --json.
"""
import argparse
import csv
import json

WIDTH, HEIGHT, LEFT, BOTTOM = 720, 320, 50, 40
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")


def means(path):
    with open(path) as f:
        rows = map(json.loads, f) if path.endswith(".json") else csv.DictReader(f)
        losses = [float(row["loss"]) for row in rows if "loss" in row]
    tens = [losses[i:i + 10] for i in range(0, len(losses) - 9, 10)]
    return [(10 * i + 5, sum(ten) / 10) for i, ten in enumerate(tens)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("-o", default="loss_curves.svg")
    parser.add_argument("curves", nargs="+", metavar="NAME=FILE.csv")
    args = parser.parse_args()
    curves = [(name, means(path)) for name, path in (c.split("=", 1) for c in args.curves)]
    steps = max(x for _, points in curves for x, _ in points) + 5
    values = [y for _, points in curves for _, y in points]
    low, high = int(min(values) * 2) / 2, int(max(values) * 2 + 1) / 2

    def place(x, y):
        return (LEFT + (WIDTH - LEFT - 20) * x / steps,
                10 + (HEIGHT - BOTTOM - 10) * (high - y) / (high - low))

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
           'font-family="sans-serif" font-size="12">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>']
    for half in range(int(low * 2), int(high * 2) + 1):
        x, y = place(0, half / 2)
        out.append(f'<path d="M{x:.1f} {y:.1f}H{WIDTH - 20}" stroke="#ddd"/>'
                   f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{half / 2}</text>')
    for step in range(0, steps + 1, max(1, steps // 6)):
        x, y = place(step, low)
        out.append(f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{step}</text>')
    out.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">step</text>')
    for k, (name, points) in enumerate(curves):
        path = "L".join("{:.1f} {:.1f}".format(*place(x, y)) for x, y in points)
        x, y = WIDTH - 200, 24 + 18 * k
        out.append(f'<path d="M{path}" fill="none" stroke="{COLORS[k]}" stroke-width="2"/>'
                   f'<path d="M{x} {y}h24" stroke="{COLORS[k]}" stroke-width="2"/>'
                   f'<text x="{x + 30}" y="{y + 4}">{name}: {points[-1][1]:.3f} at the end</text>')
    with open(args.o, "w") as f:
        f.write("\n".join(out + ["</svg>", ""]))


if __name__ == "__main__":
    main()
