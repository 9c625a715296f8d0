"""The page as a document, without a browser."""

import base64
import contextlib
import hashlib
import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from mesascope import experiments, released, store
from mesascope.cli import Plot, Reproduce, main
from mesascope.experiments import results
from mesascope.experiments.lab import SCALES
from mesascope.experiments.panels import Line
from mesascope.experiments.reproduce import draw_to
from mesascope.report import write_page
from mesascope.report.data import own_variant, rounded, to_json
from mesascope.report.section import letters
from mesascope.report.table import number, summary, with_interval
from tests.report.outcomes import outcomes

VOID = {"meta", "img", "input", "br", "link", "base"}


class Document(HTMLParser):
    """Elements with their attributes and text; complains where tags do not match."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str], list[str]]] = []
        self.open: list[int] = []
        self.feed(text)
        self.close()
        assert not self.open, [self.elements[i][:2] for i in self.open]

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, {k: v or "" for k, v in attrs}, []))
        if tag not in VOID:
            self.open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, {k: v or "" for k, v in attrs}, []))

    def handle_endtag(self, tag):
        assert self.elements[self.open.pop()][0] == tag, (tag, self.getpos())

    def handle_data(self, data):
        for i in self.open:
            self.elements[i][2].append(data)

    def all(self, tag: str = "", **attributes: str) -> list[tuple[dict[str, str], str]]:
        return [
            (have, "".join(text))
            for name, have, text in self.elements
            if tag in ("", name)
            and all(value in have.get(key, "").split() for key, value in attributes.items())
        ]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    made = outcomes()
    results.write(folder / "released" / "pieces" / "fig4" / "losses", made[2].result.arrays, {})
    (folder / "released" / "figures").mkdir()
    (folder / "released" / "figures" / "fig4.png").touch()
    return write_page(
        made, folder / "index.html", scale=SCALES["released"], differences=["fig4a-2: <fails>."]
    )


@pytest.fixture(scope="module")
def document(written) -> Document:
    return Document(written.read_text())


def test_everything_is_inside(document, written):
    for _, attributes, _ in document.elements:
        for name in ("src", "href", "action", "srcset", "data"):
            target = attributes.get(name, "#")
            beside = (written.parent / target).is_file() if ":" not in target else target.startswith("data:")
            assert target.startswith("#") or beside, attributes
    assert not document.all("link")
    assert not document.all("iframe")
    assert "url(" not in document.all("style")[0][1]
    assert "@import" not in document.all("style")[0][1]


def test_only_its_own_script_may_run(document):
    ((_, script),) = [found for found in document.all("script") if "type" not in found[0]]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = [a["content"] for a, _ in document.all("meta") if "http-equiv" in a]
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy


def test_links_lead_somewhere_and_names_are_unique(document):
    names = [a["id"] for _, a, _ in document.elements if "id" in a]
    assert len(names) == len(set(names))
    inside = [a["href"][1:] for a, _ in document.all("a") if a["href"].startswith("#")]
    assert len(inside) > 20
    assert set(inside) <= set(names)
    labelled = [a[k] for _, a, _ in document.elements for k in ("aria-labelledby", "for") if k in a]
    assert set(labelled) <= set(names)


def test_text_cannot_become_markup(document):
    assert any("interpolation </script><b>" in text for _, text in document.all("button"))
    assert any("fig4a-2: <fails>." in text for _, text in document.all("li"))


def test_data_are_the_numbers_of_the_panels(document):
    data = json.loads(document.all("script", id="data")[0][1])
    made = {outcome.experiment.id: outcome for outcome in outcomes()}
    assert data.keys() == made.keys()
    for panel, stored in zip(made["fig4"].panels, data["fig4"], strict=True):
        for line, kept in zip(panel.lines, stored["lines"], strict=True):
            assert kept["label"] == line.label
            np.testing.assert_array_equal(stored["xs"][kept["x"]], line.x)
            np.testing.assert_allclose(np.array(kept["y"], float), line.y, rtol=5e-5)
    assert len(data["fig4"][0]["xs"]) == 2  # five lines, two of them with x of their own
    assert data["fig4"][2]["lines"][0]["y"][2][10] is None
    for panel, stored in zip(made["fig3"].panels, data["fig3"], strict=True):
        assert [label for label, _ in stored["maps"]] == list(panel.maps)
        for (_, values), matrix in zip(stored["maps"], panel.maps.values(), strict=True):
            np.testing.assert_allclose(np.array(values, float), matrix, rtol=5e-3)


def test_data_are_small():
    values = np.random.default_rng(0).normal(size=(5, 1000))
    assert len(to_json(rounded(values))) < 9 * values.size
    assert (
        to_json(rounded([1.0, 123456789.0, 1e-7, np.nan, np.inf, 0.1 + 0.2]))
        == "[1,123460000,1e-07,null,null,0.3]"
    )


def test_every_claim_has_its_row(document):
    claims = [claim for outcome in outcomes() for claim in outcome.claims]
    assert {claim["verdict"] for claim in claims} == {"holds", "fails", "not testable at this preset"}
    rows = document.all("tbody", **{"class": "claim"})
    for claim, (attributes, text) in zip(claims, rows, strict=True):
        assert attributes["id"] == f"claim-{claim['id']}"
        assert attributes["data-verdict"] == claim["verdict"]
        assert claim["claim"] in text
        assert claim["source"] in text
        assert ("added later" in text) is not claim["registered"]
        assert claim["verdict"].removesuffix(" at this preset") in text
        for check in claim["checks"]:
            assert check["what"] in text
    assert "1.009" in rows[1][1]  # the authors' value
    assert "+0.5 %" in rows[1][1]
    gauges = document.all("svg", **{"class": "gauge"})
    assert len(gauges) == 1 + sum(check["ours"] is not None for claim in claims for check in claim["checks"])


def test_curves_say_where_they_come_from(document):
    lines = [line for panel in outcomes()[2].panels for line in panel.lines]
    rows = [text for a, text in document.all("tr") if "data-line" in a]
    for line, text in zip(lines, rows, strict=True):
        assert line.label in text
        assert text.strip().endswith(line.origin)
    assert len(document.all("span", **{"class": "recomputed"})) > 0
    assert len(document.all("span", **{"class": "stored"})) > 0


def test_sections_say_how_to_make_them(document, written):
    codes = [text for _, text in document.all("code")]
    for name in ("fig1", "fig3", "fig4"):
        assert f"mesascope reproduce {name} --preset released" in codes
    links = {a["href"] for a, _ in document.all("a")}
    assert {f"released/pieces/fig4/losses.{kind}" for kind in ("npz", "json")} <= links
    assert "released/figures/fig4.png" in links
    assert "released/figures/fig4.pdf" not in links  # it is not there
    arrays, about = results.read(written.parent / "released" / "arrays" / "fig4")
    np.testing.assert_array_equal(arrays["loss"].values, np.arange(10.0).reshape(2, 5))
    assert about["pieces"]["curves"]["seconds"] == 900.0
    provenance = document.all("dl", **{"class": "provenance"})[0][1]
    for part in ("cpu (cpu)", "H200 (gpu)", "commit 89abcdef01+", "jax 0.10.2", "37 seconds"):
        assert part in provenance


def test_same_numbers_make_the_same_bytes(written, tmp_path):
    pages = [
        write_page(outcomes(), tmp_path / f"{i}" / "index.html", scale=SCALES["quick"]).read_bytes()
        for i in (1, 2)
    ]
    assert pages[0] == pages[1]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (0.0, "0"), (1.0, "1"), (1.01342, "1.013"), (-0.8, "−0.8"), (0.0123456, "0.01235"),
        (1234.5678, "1235"), (0.00012345, "1.23×10⁻⁴"), (-2.5e6, "−2.5×10⁶"), (99_999.0, "99999"),
    ],
    ids=str,
)  # fmt: skip
def test_numbers(value, text):
    assert number(value) == text


def test_intervals_decide_the_digits():
    plain = with_interval(1.013425, [1.010311, 1.016539]).replace("&nbsp;", " ")
    assert '"value">1.0134<' in plain
    assert "(1.0103 to 1.0165)" in plain
    assert '"value">21<' in with_interval(21.3, [1.0, 41.6])
    assert '"value">2.5<' in with_interval(2.5, [2.5, 2.5])
    assert "interval" not in with_interval(2.5, None)


@pytest.mark.parametrize(
    ("verdicts", "text"),
    [
        ("", "No claims are made about this figure."),
        ("h", "The claim holds."), ("f", "The claim fails."), ("n", "The claim cannot be tested at this preset."),
        ("hh", "All 2 claims hold."), ("ff", "All 2 claims fail."),
        ("nn", "None of its 2 claims can be tested at this preset."),
        ("hhfh", "3 of 4 claims hold; 1 fails."), ("hff", "1 of 3 claims holds; 2 fail."),
        ("hhn", "All 2 claims hold; 1 more cannot be tested at this preset."),
    ],
    ids=lambda v: v.split()[0] if v else "none",
)  # fmt: skip
def test_summaries(verdicts, text):
    words = {"h": "holds", "f": "fails", "n": "not testable at this preset"}
    assert summary([{"verdict": words[v]} for v in verdicts]) == text


def test_what_belongs_to_a_variant():
    """A control is the same for both; a model that was trained in both ways is not."""

    def line(label, variant="as_run"):
        return Line(label=label, x=np.zeros(1), y=np.zeros((1, 1)), variant=variant)

    lines = [
        line("linear"),
        line("linear (as written)", "as_written"),
        line("GD-1"),
        line("mesa"),
        line("mesa", "as_written"),
    ]
    assert own_variant(lines) == [True, True, False, True, True]
    assert own_variant([line("linear"), line("GD-1")]) == [False, False]


def as_written(made):
    """The third outcome again, its curves from models as the text has them, and a panel that only it has."""

    def written(panel):
        return replace(panel, lines=tuple(replace(line, variant="as_written") for line in panel.lines))

    a, b, c = made.panels
    return replace(
        made,
        experiment=replace(made.experiment, id="fig4-as-written"),
        panels=(written(a), written(b), written(replace(c, letter="D"))),
        claims=tuple(
            {**claim, "id": f"{claim['id']}-as-written", "figure": "fig4-as-written"} for claim in made.claims
        ),
    )


def test_both_variants_share_a_section(tmp_path):
    made = outcomes()
    both = [*made, as_written(made[2])]
    document = Document(
        write_page(both, tmp_path / "index.html", scale=SCALES["released"], differences=[]).read_text()
    )
    test_links_lead_somewhere_and_names_are_unique(document)
    sections = [a["data-figure"] for a, _ in document.all("section") if "data-figure" in a]
    assert sections == ["fig1", "fig3", "fig4"]
    data = json.loads(document.all("script", id="data")[0][1])
    a, b, c, d = data["fig4"]
    assert [line["variant"] for line in b["lines"]] == ["as_run"] * 5 + ["as_written"] * 5
    assert (len(a["lines"]), len(c["lines"]), len(d["lines"])) == (10, 1, 1)
    commands = [text for _, text in document.all("code") if text.startswith("mesascope reproduce fig4")]
    assert commands == [
        "mesascope reproduce fig4 --preset released",
        "mesascope reproduce fig4-as-written --preset released",
    ]
    claims = {a["id"] for a, _ in document.all("tbody", **{"class": "claim"})}
    assert {"claim-fig4a-1", "claim-fig4a-1-as-written"} <= claims


def test_one_variant_alone_is_shown(tmp_path):
    alone = [as_written(outcomes()[2])]
    page = write_page(alone, tmp_path / "index.html", scale=SCALES["released"])
    data = json.loads(Document(page.read_text()).all("script", id="data")[0][1])
    assert {line["variant"] for panel in data["fig4-as-written"] for line in panel["lines"]} == {None}


def test_commands_write_the_page(tmp_path, monkeypatch, capsys):
    made = outcomes()[2].experiment
    arrays = {"loss": results.Named.of(np.ones((2, 3)), "seed", "time")}
    experiment = type(made)(**{**vars(made), "pieces": {"losses": lambda lab: arrays}})
    monkeypatch.setattr(experiments, "_FILES", {"fig4": "", "fig9": ""})
    monkeypatch.setattr(experiments, "experiment", lambda name: experiment)
    monkeypatch.setattr("mesascope.experiments.reproduce.draw_to", lambda outcome, folder: [])
    monkeypatch.setattr("mesascope.runs.keep_compiled", lambda runs: None)
    Reproduce(figures=("fig4",), preset="smoke", out=tmp_path / "r", runs=tmp_path / "runs").run()
    page = tmp_path / "r" / "index.html"
    assert str(page) in capsys.readouterr().out.replace("\n", "")
    first = page.read_text()
    assert "Preset <b>smoke</b>" in first
    assert "smoke/pieces/fig4/losses.npz" in first
    assert "Not on this page: fig4-as-written, fig9." in first
    page.unlink()
    Plot(figures=("fig4",), preset="smoke", out=tmp_path / "r").run()
    assert str(page) in capsys.readouterr().out.replace("\n", "")
    assert page.read_text() == first


@pytest.mark.parametrize(("claimed", "status"), [(1.0, None), (0.5, 3)], ids=["as committed", "differs"])
def test_exit_status_tells_what_differs_from_what_fails(claimed, status, tmp_path, monkeypatch, capsys):
    """0, or 3; and 1, where something cannot be computed."""
    (_, _, made) = outcomes()
    committed = json.loads(json.dumps(made.claims))
    committed[0]["checks"][0]["ours"] = claimed * committed[0]["checks"][0]["ours"]
    committed[0]["checks"][0]["by_seed"] = [claimed * v for v in committed[0]["checks"][0]["by_seed"]]
    monkeypatch.setattr(released, "directory", lambda: tmp_path / "results")
    store.write_json(tmp_path / "results" / "claims.json", committed)
    monkeypatch.setattr("mesascope.experiments.reproduce.reproduce", lambda *args, **more: [made])
    monkeypatch.setattr("mesascope.runs.keep_compiled", lambda runs: None)
    command = ["reproduce", "fig4", "--out", str(tmp_path / "r"), "--runs", str(tmp_path / "runs")]
    with pytest.raises(SystemExit) if status else contextlib.nullcontext() as ended:
        main(command)
    assert status == (ended.value.code if ended is not None else None)
    assert ("of one model is" in capsys.readouterr().out) == bool(status)

    def impossible(*args, **more):
        raise store.StoreError("there is nothing.")

    monkeypatch.setattr("mesascope.experiments.reproduce.reproduce", impossible)
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 1


def test_claims_about_several_panels_have_a_mark_at_each(tmp_path):
    assert letters("A") == {"A"}
    assert letters("a, C") == {"A", "C"}
    assert letters("A–D") == set("ABCD")
    assert letters("A, C–D") == set("ACD")
    assert letters("") == set()
    made = outcomes()[2]
    for panels, where in (("A, C", {0, 2}), ("A–C", {0, 1, 2}), ("B", {1}), ("", set())):
        about = ({**made.claims[0], "panel": panels},)
        page = write_page(
            [replace(made, claims=about)], tmp_path / "index.html", scale=SCALES["released"], differences=None
        )
        captions = [
            part.split("</figcaption>")[0] for part in page.read_text().split('<figure class="panel')[1:]
        ]
        assert {i for i, caption in enumerate(captions) if 'class="sign ' in caption} == where


def test_a_drawing_is_also_a_file(tmp_path):
    (path,) = draw_to(outcomes()[0], tmp_path)
    assert path.name == "fig1.svg"
