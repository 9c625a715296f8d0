"""The table of kernels, in shapes that can be interpreted; the peer is only there on a GPU."""

import pytest
from rich.console import Console

from mesascope import bench_kernels
from mesascope.bench_kernels import Shape, growth, kernel_table

TINY = (
    Shape(batch=2, time=20, key=8, value=4),
    Shape(batch=2, time=5, key=130, value=4, dtypes=("float32",)),
)


@pytest.fixture(scope="module")
def measured():
    console, rows, saved = Console(record=True, width=200), [], []
    kernel_table(console, rows, TINY, repeats=2, peer=False, after=lambda: saved.append(len(rows)))
    assert saved == list(range(1, len(rows) + 1))
    return rows, console.export_text()


@pytest.mark.slow
def test_rows(measured):
    rows, printed = measured
    found = [(row["shape"], row["dtype"], row["pass"], row["method"]) for row in rows]
    passes = ("forward", "forward+backward")
    assert found == [
        *(([2, 20, 8], dtype, name, method) for dtype in ("float32", "bfloat16") for method in ("auto", "pallas")
          for name in passes),
        *(([2, 5, 130], "float32", name, method) for method in ("auto", "pallas") for name in passes),
    ]  # fmt: skip
    for row in rows:
        assert row["ms"] > 0
        assert row["gigabytes"] > 0
        assert 0 < row["error"] < (1e-5 if row["dtype"] == "float32" else 2e-2), row
        assert f"{row['error']:.1e}" in printed
    assert "2×20×8→4" in printed


def test_an_error_is_seen(monkeypatch):
    """Of outputs and gradients; of the first tokens' outputs alone, where there are many."""
    shape = TINY[0]
    exact = bench_kernels.exactly(shape, "float32")
    assert [a.shape for a in exact] == [(2, 20, 4), (2, 20, 8), (2, 20, 8), (2, 20, 4), (2, 1)]
    assert bench_kernels.error(exact, exact, 1.0) == 0
    worse = [exact[0], 1.01 * exact[1], *exact[2:]]
    assert bench_kernels.error(worse, exact, 1.0) == pytest.approx(0.01)
    assert bench_kernels.error([*exact[:4], 1.5 * exact[4]], exact, 1.0) == pytest.approx(0.5)

    monkeypatch.setattr(bench_kernels, "LONG", 10)
    first = bench_kernels.exactly(shape, "float32")
    assert bench_kernels.error(worse, first, 1.0) < 1e-12
    late = exact[0].copy()
    late[:, 15] += 1
    assert bench_kernels.error([late], first, 1.0) < 1e-12
    late[:, 5] += 1
    assert bench_kernels.error([late], first, 1.0) > 0.1


def test_growth():
    rows = [
        {"shape": [8, time, 64], "pass": "forward", "method": "auto", "ms": ms}
        for time, ms in ((16_384, 2.0), (65_536, 8.4))
    ]
    assert growth(rows) == ["forward, auto: 65,536 tokens over 16,384: +5.0% from linear"]
    assert growth(rows[:1]) == []
