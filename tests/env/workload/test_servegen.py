"""Requests drawn from ServeGen's windows keep each client's rate and burstiness."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from faser.env.workload.request_trace import TraceError, shipped_trace
from faser.env.workload.servegen import WINDOW_S, ClientWindow, draw_trace, read_windows, shipped_windows

HEADER = "client,window_start_s,rate_rps,cv,dist,arg1,arg2\n"


def test_the_shipped_week_draws_at_its_rate_and_the_same_by_seed() -> None:
    windows, lengths = shipped_windows(), shipped_trace("azure-conv")
    rate_rps = sum(window.rate_rps for window in windows if window.start_s == 36000.0)
    drawn = draw_trace(windows, 36000.0, 600.0, lengths, seed=1)
    assert len(drawn) == pytest.approx(rate_rps * 600.0, abs=sum(w.start_s == 36000.0 for w in windows))
    assert (np.diff(drawn.arrival_s) >= 0).all()
    assert (drawn.arrival_s == draw_trace(windows, 36000.0, 600.0, lengths, seed=1).arrival_s).all()
    assert len(np.unique(drawn.input_tokens)) > 50


@pytest.mark.parametrize(("law", "shape", "scale"), [("Gamma", 0.05, 20.0), ("Weibull", 0.4, 0.3)])
def test_a_bursty_client_stays_bursty(law: str, shape: float, scale: float) -> None:
    bursty = ClientWindow(0, 1200.0, 1.0, law, shape, scale).arrivals_s(np.random.default_rng(0))
    steady = ClientWindow(0, 1200.0, 1.0, "Gamma", 100.0, 0.01).arrivals_s(np.random.default_rng(0))
    assert len(bursty) == len(steady) == WINDOW_S
    assert 1200.0 <= bursty.min() <= bursty.max() <= 1800.0
    gaps = np.diff(bursty)
    assert gaps.std() / gaps.mean() > 1.5
    assert np.diff(steady).std() / np.diff(steady).mean() < 0.2


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (HEADER + "0,0,1.0,2.0,Pareto,1,1\n", "w.csv.gz, line 2: '0,0,1.0,2.0,Pareto,1,1'"),
        (HEADER + "0,0,1.0,2.0,Gamma,1,1\n0,0,0,2.0,Gamma,1,1\n", "w.csv.gz, line 3"),
        (HEADER + "0,0\n", "w.csv.gz, line 2"),
        ("a,b\n", "w.csv.gz, line 1: header"),
    ],
)
def test_bad_windows_are_refused_with_file_and_row(tmp_path: Path, content: str, named: str) -> None:
    file = tmp_path / "w.csv.gz"
    file.write_bytes(gzip.compress(content.encode()))
    with pytest.raises(TraceError, match=named):
        read_windows(file)


def test_a_time_without_clients_is_refused() -> None:
    with pytest.raises(TraceError, match="no request between"):
        draw_trace([], 0.0, 60.0, shipped_trace("azure-conv"), 0)
