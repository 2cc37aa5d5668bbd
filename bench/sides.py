"""Sides of a comparison on one machine: each is a process of its own, and they take turns, so that a busy machine slows
all of them. A side is a script called with `--serve NAME`; it answers cases, (prompt rows or 0, sequences), with tokens
per second, or nan where the device's memory did not suffice.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Speeds = dict[str, dict[str, list[float]]]  # case → side → tokens per second, by round


def serve(load: Callable[[], Callable[[int, int], float]], threads: int) -> None:
    """Read cases from stdin, one JSON list a line, and answer each. load: makes the model; stdout is out of its way."""
    import torch

    torch.set_num_threads(threads)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not look like an answer
    with torch.inference_mode():
        run = load()
        run(32, 1)
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            try:
                found = run(*json.loads(line))
            except torch.OutOfMemoryError:
                found = math.nan
                torch.cuda.empty_cache()  # the other sides share the device
            print(found, file=answers, flush=True)


class Side:
    """The process of one side, with a thread here that watches its memory. arguments: of its script, with --serve."""

    def __init__(self, name: str, script: str, arguments: Sequence[str]) -> None:
        self.name = name
        self.peak = {"RssAnon": 0, "VmHWM": 0}  # kB
        command = [sys.executable, script, *arguments, "--serve", name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._watch, daemon=True).start()
        if self._answer() != "ready":
            raise SystemExit(f"{name}: did not start")

    def run(self, case: tuple[int, int]) -> float:
        assert self.process.stdin is not None
        print(json.dumps(case), file=self.process.stdin, flush=True)
        return float(self._answer())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def _watch(self) -> None:
        while self.process.poll() is None:
            for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
                key, _, value = line.partition(":")
                if key in self.peak:
                    self.peak[key] = max(self.peak[key], int(value.split()[0]))
            time.sleep(0.02)


def take_turns(sides: Sequence[Side], cases: Mapping[str, tuple[int, int]], rounds: int) -> Speeds:
    """Every case on every side in every round; who begins changes from round to round. Closes the sides."""
    speeds: Speeds = {case: {side.name: [] for side in sides} for case in cases}
    for i in range(rounds):
        for case, shape in cases.items():
            for side in sides if i % 2 else sides[::-1]:
                speeds[case][side.name].append(side.run(shape))
            latest = {name: round(found[-1], 2) for name, found in speeds[case].items()}
            print(f"round {i + 1} of {rounds}: {case}: {latest}", file=sys.stderr, flush=True)
    for side in sides:
        side.close()
    return speeds
