"""Extra memory and time of the linear cross-entropy, beside plain and torch's chunked one.

    python benchmarks/loss.py            all eight cases: some twenty minutes on two cores
    python benchmarks/loss.py --quick    the smaller number of rows, the smaller vocabulary

Each measurement is a forward and a backward in a process of its own; the forms take turns, and
each keeps its shortest time. Extra memory is the highest resident size over the one before, less
the gradients of the two inputs. Where plain does not fit (it takes three times the logits), its
figures are those of fewer rows, scaled up, with a star.
Linux only: the highest resident size is read and reset through /proc.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from launch import proc_bytes

WIDTH = 512
FORMS = ("plain", "torch", "sum", "rows")
ROUNDS = 2


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    rows: int
    vocab: int
    dtype: str

    @property
    def plain_bytes(self) -> int:
        """Logits, their log-softmax and its gradient."""
        return 3 * self.rows * self.vocab * torch.empty((), dtype=getattr(torch, self.dtype)).nbytes


@dataclass(frozen=True)
class Figure:
    """What one form took; ``scaled`` if measured on fewer rows."""

    seconds: float
    megabytes: float
    scaled: bool = False

    def __str__(self) -> str:
        return f"{self.seconds:6.2f} s {self.megabytes:6.0f} MB{'*' if self.scaled else ' '}"


def _loss(form: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if form == "plain":
        return lambda hidden, weight, labels: F.cross_entropy(
            F.linear(hidden, weight), labels, reduction="sum"
        )
    if form == "torch":
        options = torch.nn.LinearCrossEntropyOptions()
        return lambda hidden, weight, labels: F.linear_cross_entropy(
            hidden, weight, labels, reduction="sum", options=options
        )
    from lightning_dcp.loss import linear_cross_entropy

    if form == "sum":
        return linear_cross_entropy
    return lambda *inputs: linear_cross_entropy(*inputs, reduction="none").sum()


def _inputs(rows: int, vocab: int, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    wanted = getattr(torch, dtype)
    hidden = torch.randn(rows, WIDTH, generator=generator).to(wanted)
    weight = (torch.randn(vocab, WIDTH, generator=generator) / WIDTH**0.5).to(wanted)
    labels = torch.randint(vocab, (rows,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def measure(form: str, case: Case) -> Figure:
    """One forward and backward, in this process."""
    loss = _loss(form)
    loss(*_inputs(64, 256, case.dtype)).backward()
    hidden, weight, labels = _inputs(case.rows, case.vocab, case.dtype)
    Path("/proc/self/clear_refs").write_text("5")  # resets the highest resident size
    before = proc_bytes("/proc/self/status", "VmRSS")
    start = time.perf_counter()
    loss(hidden, weight, labels).backward()
    seconds = time.perf_counter() - start
    extra = proc_bytes("/proc/self/status", "VmHWM") - before - hidden.nbytes - weight.nbytes
    return Figure(seconds, extra / 1e6)


def _in_child(form: str, case: Case) -> Figure:
    arguments = [form, str(case.rows), str(case.vocab), case.dtype]
    command = [sys.executable, __file__, "--child", *arguments]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    seconds, megabytes = json.loads(output.splitlines()[-1])
    return Figure(seconds, megabytes)


def _compare(case: Case, rounds: int) -> dict[str, Figure]:
    """Every form on ``case``: the shortest time and the most memory over the rounds."""
    plain, scale = case, 1
    while plain.plain_bytes > 0.7 * proc_bytes("/proc/meminfo", "MemAvailable"):
        plain, scale = Case(plain.rows // 2, case.vocab, case.dtype), 2 * scale
    found: dict[str, list[Figure]] = {form: [] for form in FORMS}
    for _ in range(rounds):
        for form in FORMS:
            found[form].append(_in_child(form, plain if form == "plain" else case))
    best = {
        form: Figure(min(one.seconds for one in all_), max(one.megabytes for one in all_))
        for form, all_ in found.items()
    }
    if scale > 1:
        seconds, megabytes = best["plain"].seconds, best["plain"].megabytes
        best["plain"] = Figure(seconds * scale, megabytes * scale, scaled=True)
    return best


def _print_case(case: Case, figures: dict[str, Figure]) -> None:
    plain, chunked, ours, rows = (figures[form] for form in FORMS)
    cells = [f"{case.dtype:8} {case.rows:6,} {case.vocab:8,}"]
    cells += [str(figures[form]) for form in FORMS]
    cells.append(f"1/{plain.megabytes / ours.megabytes:<5.1f}")
    cells.append(f"1/{plain.megabytes / rows.megabytes:<5.1f}")
    cells.append(f"{ours.seconds / plain.seconds:5.2f} {ours.seconds / chunked.seconds:5.2f}")
    print(" | ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="4,096 rows, vocabulary 49,152 only")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="processes per form and case")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        form, rows, vocab, dtype = arguments.child
        figure = measure(form, Case(int(rows), int(vocab), dtype))
        print(json.dumps([figure.seconds, figure.megabytes]))
        return
    rows = (4096,) if arguments.quick else (4096, 16384)
    vocabularies = (49152,) if arguments.quick else (49152, 151936)
    print(f"hidden {WIDTH}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(
        "dtype      rows    vocab | plain             | torch chunked     | ours, sum         | "
        "ours, per row     | sum/plain and per row/plain memory | sum/plain and sum/torch time"
    )
    for case in (
        Case(r, v, dtype) for dtype in ("float32", "bfloat16") for v in vocabularies for r in rows
    ):
        _print_case(case, _compare(case, arguments.rounds))


if __name__ == "__main__":
    main()
