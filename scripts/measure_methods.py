"""Which way to compute the mesa operation is fastest for a shape on this machine: time, memory and error of each.

python scripts/measure_methods.py 192 1024 384 64                       # batch · heads, time, width of keys, of values
python scripts/measure_methods.py 192 1024 384 64 --methods chunked:64 chunked:256 prefix:128 cg --dtype bfloat16

A number behind a method is its chunk size.
"""

import argparse
from dataclasses import replace

from mesascope.bench_kernels import Shape, ours
from mesascope.ops.methods import NAMED, Chunked, Method, Prefix


def method(text: str) -> Method:
    name, _, size = text.partition(":")
    if name not in NAMED:
        raise SystemExit(f"{text}: expected one of {', '.join(NAMED)}.")
    of = NAMED[name]
    if not size:
        return of
    if not isinstance(of, Chunked | Prefix):
        raise SystemExit(f"{text}: only chunked and prefix have chunks.")
    return replace(of, chunk_size=int(size))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", type=int, nargs=4, metavar=("BATCH", "TIME", "KEY", "VALUE"))
    parser.add_argument("--methods", nargs="+", default=["chunked", "prefix"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    batch, time, key, value = given.shape
    shape = Shape(batch=batch, time=time, key=key, value=value)
    print("| method | pass | ms | GB | error |\n|---|---|--:|--:|--:|")
    for text in given.methods:
        for row in ours(shape, given.dtype, method(text), repeats=given.repeats):
            memory = "" if row["gigabytes"] is None else f"{row['gigabytes']:.2f}"
            print(f"| {text} | {row['pass']} | {row['ms']:.3f} | {memory} | {row['error']:.1e} |", flush=True)


if __name__ == "__main__":
    main()
