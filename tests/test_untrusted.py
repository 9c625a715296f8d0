"""Files by somebody who means harm, or by a disk that does."""

import io
import json
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from scripts import fuzz

from mesascope import released, runs, store
from mesascope.experiments import results
from mesascope.experiments.lab import SCALES, Lab
from mesascope.journal import read_lines
from mesascope.progress import progress_on
from mesascope.store import StoreError
from mesascope.tasks.shards import read_record, sha256_of
from mesascope.tasks.text import Corpus
from mesascope.untrusted import check, is_plain_name, map_safetensors, parse_json, read_json, read_npz

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("standard_promotion")]


@pytest.mark.parametrize("name", fuzz.READERS)
def test_readers_answer_with_a_value_or_their_own_error(name, tmp_path):
    """A few of the cases that docs/fuzz.md counts."""
    case = fuzz.Case(fuzz.READERS[name], tmp_path)
    for seed in range(15 if name == "released model" else 40):
        outcome, told = case.run(seed)
        assert outcome in fuzz.OUTCOMES
        assert outcome != "failed", f"case {seed}: {told}"


def test_fuzzing_notices_a_reader_that_does_not_check(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_check_sum", lambda *_: None)
    case = fuzz.Case(fuzz.READERS["weights"], tmp_path)
    assert "failed" in {case.run(seed)[0] for seed in range(200)}


@pytest.mark.parametrize(
    "text",
    ["NaN", "[Infinity]", "1e999", "1" * 5000, str(2**63), "[" * 10**5, "[" * 65 + "]" * 65, '{"a": 1, "a": 2}',
     r'"\ud800"', "", "{", "\ufeff{}"],
)  # fmt: skip
def test_json_that_is_refused(text, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(StoreError, match=r"a\.json: expected JSON, but it is damaged"):
        read_json(path)


def test_json_that_is_read():
    value = {"a": [1, -0.5, None, True, "ü\U0001d54f"], "b": {"c": -(2**63)}}
    assert parse_json(json.dumps(value), "") == value
    assert parse_json(r'"\ud835\udd4f"', "") == "\U0001d54f"


def test_a_file_too_long_to_be_read_is_not(tmp_path):
    path = tmp_path / "a.json"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(StoreError, match=r"expected at most 4,194,304 bytes, got 1,099,511,627,776"):
        read_json(path)
    with pytest.raises(StoreError, match=r"belong to nothing|expected JSON"):
        map_safetensors(path)


def test_forms():
    form = {"a": [int], "b?": (str, None), "c": {str: float}}
    good = {"a": [1, 2], "b": None, "c": {"x": 1, "y": 0.5}, "other": 3}
    assert check(good, form, "it") is good
    for bad, told in (
        ([], "it: expected an object"),
        ({"a": [], "b": 1}, "it, 'b': expected null"),
        ({"a": []}, "it: 'c' is missing"),
        ({"a": [True], "c": {}}, "it, 'a', 0: expected a value of type int, got True"),
        ({"a": [], "c": {"x": "1"}}, "it, 'c', 'x': expected a value of type float"),
    ):
        with pytest.raises(StoreError, match=told):
            check(bad, form, "it")


def test_names_of_files():
    assert all(map(is_plain_name, ("softmax-7", "a.b_c+d-", "größe", "x" * 200)))
    bad = ("", ".", "..", ".a", "a/b", "/a", "a\\b", "a b", "a\0", "a\n", "-a", "x" * 201)
    assert not any(map(is_plain_name, bad))


def written(path, header, rest=b"", length=None):
    text = json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + rest)
    return path


@pytest.mark.parametrize(
    ("header", "rest"),
    [
        ({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}}, bytes(4)),
        ({"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}, bytes(4)),
        (
            {"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 0]}},
            b"",
        ),  # 2**64 bytes, were they to wrap
        ({"a": {"dtype": "F32", "shape": [0, 2**62, 4], "data_offsets": [0, 0]}}, b""),
        ({"a": {"dtype": "F32", "shape": [1] * 40, "data_offsets": [0, 4]}}, bytes(4)),
        ({"a": {"dtype": "O", "shape": [1], "data_offsets": [0, 8]}}, bytes(8)),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(4)),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8)),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(8)),
        (
            {n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"},
            bytes(4),
        ),  # one upon the other
        ({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)),
        ([], b""),
    ],
)
def test_headers_that_do_not_fit_their_file(header, rest, tmp_path):
    with pytest.raises(StoreError):
        map_safetensors(written(tmp_path / "a", header, rest))


def test_a_header_longer_than_its_file(tmp_path):
    for length in (100, 2**22 + 1, 2**63, 2**64 - 1):
        with pytest.raises(StoreError, match="says that its header has"):
            map_safetensors(written(tmp_path / "a", {}, length=length))


def test_our_reader_of_safetensors_is_the_libraries(tmp_path):
    """Every dtype, empty arrays and scalars among them."""
    import ml_dtypes
    from safetensors.numpy import load_file, save_file

    kinds = ("?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", ml_dtypes.bfloat16)
    rng = np.random.default_rng(0)
    arrays = {f"a{i}": (100 * rng.random((3, i, 2))).astype(kind) for i, kind in enumerate(kinds)}
    arrays["scalar"] = np.array(0.5, np.float32)
    save_file(arrays, tmp_path / "a", {"x": "y"})
    found, metadata = map_safetensors(tmp_path / "a")
    assert metadata == {"x": "y"}
    for name, array in load_file(tmp_path / "a").items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_arrays_of_another_shape_are_not_read(tmp_path):
    """A terabyte that is all holes: the header alone decides."""
    path = written(tmp_path / "a", {
        "__metadata__": {"mesascope": '{"sha256": ""}'},
        "x": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]},
    })  # fmt: skip
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + 2**40)
    with pytest.raises(StoreError, match=r"'x' is \(\(274877906944,\), .* expected \(\(3,\)"):
        store.read_arrays(path, {"x": np.zeros(3, np.float32)})


def test_archives_that_unpack_to_more_than_they_should(tmp_path):
    path = tmp_path / "a.npz"
    path.write_bytes(fuzz.bomb(65))
    with pytest.raises(StoreError, match="it would unpack to 68,157,568 bytes"):
        read_npz(path, ["loss"])
    path.write_bytes(fuzz.bomb(1))
    assert read_npz(path, ["loss"])["loss"].shape == (2**17,)


def test_an_archive_of_holes(tmp_path):
    """It is as long as it says, and takes up nothing."""
    path, packed = tmp_path / "a.npz", bytearray(fuzz.bomb(1))
    at = packed.index(b"PK\x01\x02")
    packed[at + 20 : at + 28] = (2**31).to_bytes(4, "little") * 2  # sizes in the archive's index
    with path.open("wb") as file:
        file.truncate(2**31)
        file.seek(2**31)
        file.write(packed)
    with pytest.raises(StoreError, match="it would unpack to 2,147,483,648 bytes"):
        read_npz(path, ["loss"])


def test_pickles_are_not_opened(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, a=np.array([{}], object), allow_pickle=True)
    with pytest.raises(StoreError, match="no array of numbers"):
        read_npz(path, ["a"])
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", b"\x80\x04cposix\nsystem\n(S'true'\ntR.")
    with pytest.raises(StoreError, match="no array of numbers"):
        read_npz(path, ["a"])


def test_our_reader_of_npz_is_numpys(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.normal(size=(2, 3)), "b": np.float32(1.5), "c": np.arange(0), "d": rng.random((2, 0, 3)) > 0.5,
        "e": np.asfortranarray(rng.normal(size=(4, 3)).astype(np.float16)), "f": np.arange(3, dtype=np.uint64),
        "g": np.array([1 + 2j]),
    }  # fmt: skip
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", **arrays)
        found = read_npz(tmp_path / "a.npz", arrays)
        with np.load(tmp_path / "a.npz") as theirs:
            for name in arrays:
                assert found[name].dtype == theirs[name].dtype
                np.testing.assert_array_equal(found[name], theirs[name])


def test_names_in_files_do_not_lead_out_of_their_folder(tmp_path):
    """Of a configuration; of the shards of a corpus, which are made anew where they do not fit their checksum; of the
    models behind a figure."""
    with pytest.raises(ValueError, match="name: expected letters"):
        fuzz.replace(fuzz.CONFIG, name="../outside")
    fuzz.make_run(tmp_path)
    path = tmp_path / fuzz.RUN / "config.json"
    path.write_text(path.read_text().replace('"name": "tiny"', '"name": "../../outside"'))
    with pytest.raises(StoreError, match="not a valid Config: name"):
        runs.find(path.parent).config  # noqa: B018

    precious = tmp_path / "precious.txt"
    precious.write_text("not to be deleted")
    folder = tmp_path / "corpus"
    folder.mkdir()
    fuzz.make_corpus(folder)
    index = folder / "index.json"
    for old, new in (("train-00000.safetensors", "../precious.txt"), ("vocab.bpe", "../precious.txt")):
        text = index.read_text()
        index.write_text(text.replace(old, new))
        with pytest.raises(StoreError, match=r"no corpus has|no tokenizer"):
            Corpus(folder).verify()
        index.write_text(text)
    assert precious.exists()

    assert Lab(SCALES["smoke"], runs=tmp_path).digest(f"runs/{fuzz.RUN}") is not None
    assert Lab(SCALES["smoke"], runs=tmp_path / "x").digest(f"runs/../{fuzz.RUN}") is None


def test_what_is_written_about_arrays_has_a_checksum_too(tmp_path):
    path = tmp_path / "a.safetensors"
    store.write_arrays(path, {"x": np.zeros(3)}, step="12")
    assert store.read_metadata(path)["step"] == "12"
    path.write_bytes(path.read_bytes().replace(b'\\"step\\": \\"12\\"', b'\\"step\\": \\"13\\"'))
    with pytest.raises(StoreError, match="its header does not fit its checksum"):
        store.read_metadata(path)


def test_a_damaged_line_of_metrics_is_named(tmp_path):
    """A torn last line is what a killed process leaves, and left out; anything else is damage."""
    fuzz.make_run(tmp_path)
    run, path = runs.find(tmp_path / fuzz.RUN), tmp_path / fuzz.RUN / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert run.metrics()["step"].tolist() == [0, 5, 10]
    for bad in (
        b"\xff\xfe",
        b"{}",
        b"3",
        b'{"step": 5, "eval_loss": [1.0], "train_loss": [null]}',
        b"[" * 10**5,
    ):
        lines = whole.split(b"\n")
        path.write_bytes(b"\n".join([lines[0], bad, *lines[2:]]))
        with pytest.raises(StoreError, match=r"metrics\.jsonl, line 2: "):
            run.metrics()


def test_a_figure_whose_axes_do_not_fit(tmp_path):
    fuzz.make_figure(tmp_path)
    shutil.copy(tmp_path / "fig1.npz", tmp_path / "fig2.npz")
    about = read_json(tmp_path / "fig1.json")
    store.write_json(tmp_path / "fig2.json", about | {"axes": about["axes"] | {"steps": ["a", "b"]}})
    with pytest.raises(StoreError, match=r"fig2\.json does not fit fig2\.npz"):
        results.read(tmp_path / "fig2")
    store.write_json(tmp_path / "fig2.json", about | {"axes": {"../../x": ["a"]}})
    with pytest.raises(StoreError, match="missing or damaged"):
        results.read(tmp_path / "fig2")


def test_a_small_file_stays_a_small_value(tmp_path):
    """Values take up to thirty times the room of their text, so texts that no writer writes are not parsed at all."""
    path = tmp_path / "a.json"
    path.write_text("[" + "{}," * 2**21 + "{}]")
    with pytest.raises(StoreError, match=r"expected at most 4,194,304 bytes, got 6,291,4"):
        read_json(path)
    with pytest.raises(StoreError, match="says that its header has 8,388,6"):
        map_safetensors(written(tmp_path / "a", [{}] * 2**21))
    fuzz.make_run(tmp_path)
    (tmp_path / fuzz.RUN / "metrics.jsonl").write_text(path.read_text() + "\n")
    with pytest.raises(StoreError, match="line 1: expected at most 4,194,304 bytes"):
        runs.find(tmp_path / fuzz.RUN).metrics()


@pytest.mark.timeout(60)
def test_pipes_and_devices_are_not_waited_for(tmp_path):
    fuzz.make_run(tmp_path)
    run = runs.find(tmp_path / fuzz.RUN)
    for name in ("config.json", "metrics.jsonl", "weights.safetensors"):
        (run.path / name).unlink()
        os.mkfifo(run.path / name)
    for read in (
        lambda: run.config,
        lambda: read_lines(run.path / "metrics.jsonl", 2),
        lambda: store.read_metadata(run.path / "weights.safetensors"),
        lambda: read_npz(run.path / "config.json", ["a"]),
        lambda: read_json(Path("/dev/zero")),
    ):
        with pytest.raises(StoreError, match="expected a regular file"):
            read()
    assert sha256_of(run.path / "config.json").startswith("cannot be read")


def holes(path, size=2**40, **metadata):
    """A file that says that it has a terabyte, and takes up nothing."""
    about = metadata | {"sha256": "", "sha256_of_metadata": store._metadata_checksum(metadata)}
    header = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    written(path, {"__metadata__": {"mesascope": json.dumps(about)}, "x": header})
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + size)


@pytest.mark.timeout(60)
def test_nothing_is_hashed_that_cannot_be_right(tmp_path):
    """A second per some hundred megabytes: a terabyte of holes would take an hour."""
    fuzz.make_unfinished(tmp_path)
    run = runs.find(tmp_path / fuzz.RUN)
    holes(run.path / "checkpoint.safetensors", step="7", config=store.digest(fuzz.CONFIG))
    assert run.step == 7
    with pytest.raises(runs.RunError, match=r"is missing.*No good one is left"):
        run._restore(fuzz.shapes(), progress_on(None))

    fuzz.make_run(tmp_path)
    holes(run.path / "weights.safetensors")
    notes = Console(record=True, file=io.StringIO(), width=1000)
    runs._mend(run, runs.Trainer(fuzz.CONFIG), progress_on(notes))
    assert "is missing" in notes.export_text()
    assert not run.finished  # it is trained again

    path = tmp_path / "a.safetensors"
    holes(path, config=json.dumps(store.to_dict(fuzz.CONFIG)), record="{}")
    for read in (
        lambda: store.read_named(path),
        lambda: released.read_model(path),
        lambda: read_record(path, 2**24),
    ):
        with pytest.raises(StoreError, match=r"bytes of arrays, got 1,099,511,627,776|is missing"):
            read()


def test_fuzzing_with_atheris_says_where_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("sys.argv", ["fuzz.py", "--atheris"])
    with pytest.raises(SystemExit):
        fuzz.main()
    assert "pip install atheris" in capsys.readouterr().err
