"""`faser bench`, for controller/cli/main.py. Only parses; heavy imports are inside the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..extras import require_extra


def bench(
    quick: Annotated[
        bool, typer.Option("--quick", help="Three loads, four rivals, three pairs: takes minutes.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end; tables go to stderr.")
    ] = False,
    loads: Annotated[
        str | None, typer.Option(help="Concurrent requests, with commas; default 1,2,4,8,16,32,64, quick 1,8,32.")
    ] = None,
    rivals: Annotated[
        str | None,
        typer.Option(
            help="Some of none, k1 to k8, table (Dynamic SD, tuned), ngram, ngram:8, suffix, suffix:own, or policies."
        ),
    ] = None,
    pairs: Annotated[int | None, typer.Option(help="Rounds in which every arm has a turn; default 6, quick 3.")] = None,
    trace: Annotated[
        list[str] | None, typer.Option(help="Also replay azure-conv, azure-code, mooncake or servegen; repeatable.")
    ] = None,
    kinds: Annotated[
        str, typer.Option(help="Prompts: all, chat, code, maths, summarisation, tools; a+b mixes, a,b measures each.")
    ] = "all",
    out: Annotated[Path | None, typer.Option(help="The results file to write; default: a folder in runs.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Add rounds, loads or rivals to this results file.")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="The picture (.svg or .png); default: beside the results.")
    ] = None,
    policy: Annotated[str, typer.Option(help="FASER's policy.")] = "price",
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts and arrivals.")] = 0,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.0, help="Longest time for a load whose interval stays wide; default 6, quick 0."),
    ] = None,
    turn_seconds: Annotated[
        float | None, typer.Option(help="Length of a turn without speculation; default 6, quick 1.5.")
    ] = None,
    trace_seconds: Annotated[float, typer.Option(help="Length of a replay, in seconds.")] = 60.0,
    peak_rps: Annotated[
        float | None,
        typer.Option(help="Peak rate of a replay, requests/s; default: near this machine's limit."),
    ] = None,
    warp: Annotated[float, typer.Option(help="Factor by which a trace's clock is sped up.")] = 60.0,
    swell: Annotated[
        bool, typer.Option("--swell", help="Make the trace's rate rise from a sixth of its peak and fall back.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of each engine; default: all cores but one.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Length of each answer in a closed loop.")] = 96,
    temperature: Annotated[float, typer.Option(help="Temperature of sampling, 0 to 2; 0: greedy.")] = 0.0,
    dtype: Annotated[
        str | None,
        typer.Option(help="bfloat16, or float32 (all arms then give equal texts); default: as `faser serve`."),
    ] = None,
    held: Annotated[
        int,
        typer.Option(
            min=0, help="Record answers to this many prompts and hold every arm to them; 0: arms write their own."
        ),
    ] = 0,
    starts: Annotated[
        int, typer.Option(min=1, help="Start all servers anew up to this many times; intervals are then over starts.")
    ] = 1,
    classes: Annotated[
        str | None,
        typer.Option(
            help="Measure classes of requests, NAME:CLIENTS:PACE, as interactive:2:0.7,batch:6:2.0; the pace is a time "
            "per token as a multiple of that without speculation; with --trace, shares of its requests."
        ),
    ] = None,
    class_seconds: Annotated[
        float | None, typer.Option(help="Length of an arm's turn with --classes; default 45, quick 20.")
    ] = None,
    peaks: Annotated[
        str | None, typer.Option(help="With --classes and --trace: multiples of the peak rate, as 0.5,1,1.5,2.")
    ] = None,
    table: Annotated[Path | None, typer.Option(help="Only print the Markdown tables of this results file.")] = None,
    note: Annotated[str, typer.Option(help="A remark to keep in the results.")] = "",
) -> None:
    """Compare FASER with its rivals on real servers that take turns."""
    require_extra("train", "scipy")
    from ..bench.bench import BenchOptions, print_tables, run_bench
    from ..bench.classes.bench import ClassOptions, print_class_tables, require_no_class_flags, run_class_bench
    from ..bench.classes.result import has_classes

    if table is not None:
        (print_class_tables if has_classes(table) else print_tables)(table)
        return
    options = BenchOptions(
        quick=quick, json=json, loads=loads, rivals=rivals, pairs=pairs, traces=tuple(trace or ()), kinds=kinds,
        out=out, picture=picture, policy=policy, seed=seed, minutes=minutes, turn_s=turn_seconds,
        trace_s=trace_seconds, peak_rps=peak_rps, warp=warp, swell=swell, threads=threads, max_tokens=max_tokens,
        note=note, resume=resume, dtype=dtype, held=held, starts=starts, temperature=temperature,
    )  # fmt: skip
    if classes is not None:
        raise typer.Exit(run_class_bench(ClassOptions(options, classes, class_seconds, peaks)))
    require_no_class_flags(class_seconds, peaks)
    raise typer.Exit(run_bench(options))
