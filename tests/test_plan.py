"""The plan of docs/sweeps.md is what its script makes of the committed times."""

import json
import sys
from pathlib import Path

import pytest
from scripts import plan_sweep

from mesascope.presets import PRESETS

DOCS = Path(__file__).parents[1] / "docs"


def test_measured_times_are_used_and_the_others_keep_to_them():
    found, start, both = plan_sweep.costs(json.loads(plan_sweep.TIMES.read_text()))
    assert found.keys() == PRESETS.keys()
    assert {name: found[name].ms for name in ("hybrid-mesa", "softmax-7", "partial-softmax-7")} == {
        "hybrid-mesa": 1.67, "softmax-7": 5.23, "partial-softmax-7": 10.26,
    }  # fmt: skip
    assert found["linear-1"].seconds == start == 18
    assert found["linear-6"].seconds == 144
    assert all(start <= seconds < 40 for seconds in both.values())
    # No longer than what was measured with a second run on the GPU.
    assert found["hybrid-mesa"].seconds < 69
    assert found["softmax-7"].seconds < 82
    assert found["binding-softmax-7"].ms == found["softmax-7"].ms  # the same model
    assert "reckoned" in found["binding-softmax-7"].how


def test_times_of_other_presets_are_refused():
    times = {"seeds": 5, "measured": [{"preset": "linear-1", "steps": 7, "seconds": 18, "source": "shared"}]}
    with pytest.raises(SystemExit, match="linear-1 has other steps now"):
        plan_sweep.costs(times)


def test_the_documented_plan(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plan_sweep.py", "--seeds", "100", "--gpus", "1", "8", "64"])
    plan_sweep.main()
    printed = capsys.readouterr().out.splitlines()
    text = (DOCS / "sweeps.md").read_text()
    told = text[text.index("## What the whole paper costs") :].splitlines()
    assert len([line for line in told if line.startswith("|")]) > 20
    assert [line for line in told if line.startswith("|") and line not in printed] == []
