"""Folders of a run store, which is a directory or anything that fsspec has a URL for.

Runs need what object stores do not have: locks, lines that are appended, files that are renamed. So a run of a store at
a URL is trained in a folder of this machine (below `$XDG_CACHE_HOME/mesascope`), which begins as a copy of what the
store has of that run, and is sent there with every checkpoint. Whoever only reads has a copy of its own, brought up to
date each time. A file is sent under another name and then renamed, and `result.json` is the last: what is seen at a URL
is whole.

There a run is held by a marker, `.held`, that changes every few seconds for as long as the process lives. No clock is
read: whoever finds a marker looks whether it changes.
"""

import hashlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, final

from mesascope import store
from mesascope.untrusted import StoreError, is_plain_name, read_json
from mesascope.untrusted import check as checked

SECONDS_BETWEEN_BEATS = 3.0
SECONDS_WITHOUT_A_BEAT = 30.0
# What follows needs what stands before it.
LAST = ("checkpoint.previous.safetensors", "checkpoint.safetensors", "result.json")
MARKER, HOLDER, RECORD = ".held", ".holder", ".record.json"


class Folder(Protocol):
    """A folder of a run store.

    Attributes:
        path: where it is on this machine, for whoever holds it.
        where: what its users call it.
    """

    path: Path
    where: str

    def has(self, name: str) -> bool:
        """Whether the store has this file."""
        ...

    def seen(self, *, weights: bool = True) -> Path:
        """Where it can be read as the store has it now; if so wanted, without what weighs most."""
        ...

    def fetch(self, name: str) -> Path:
        """Where one file can be read as the store has it now, if it has it."""
        ...

    def grown(self, name: str) -> Path:
        """The path of a file that only ever grows, with what other machines have added to it."""
        ...

    def send(self, name: str) -> None:
        """One file, from `path` to the store."""
        ...

    def merge(self) -> None:
        """Files that `path` or the store lacks, from the other: for such as never change."""
        ...

    def held(
        self,
        *,
        field: str,
        doing: str,
        error: type[Exception],
        busy: type[Exception],
        note: Callable[[str], None],
    ) -> AbstractContextManager[None]:
        """For one process at a time: see `store.locked`. `note` is told of waiting."""
        ...

    def is_held(self) -> bool:
        """Whether a process holds it, on any machine."""
        ...

    def mirrored(self) -> AbstractContextManager[None]:
        """While it is held: `path` begins as the store has the folder, and the store ends as `path` has it."""
        ...

    def push(self) -> None:
        """While it is mirrored: all changes so far, to the store."""
        ...


def is_url(runs: str | Path) -> bool:
    return isinstance(runs, str) and "://" in runs


def directory(runs: str | Path) -> Path:
    """The directory of runs; or of a store at a URL, the one that stands for it on this machine."""
    if not is_url(runs):
        return Path(runs)
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "mesascope" / hashlib.sha256(str(runs).rstrip("/").encode()).hexdigest()[:16]


def absolute(runs: str | Path) -> str:
    """For a process that may run elsewhere."""
    return str(runs) if is_url(runs) else str(Path(runs).absolute())


def at(runs: str | Path, name: str) -> Folder:
    """The folder of that name."""
    return _Mirrored(str(runs), name) if is_url(runs) else _Local(Path(runs) / name)


def names(runs: str | Path) -> list[str]:
    """The runs that there are."""
    if not is_url(runs):
        return sorted(path.parent.name for path in Path(runs).glob("*/config.json"))
    with _reached(str(runs)):
        fs, root = _open(str(runs))
        found = [path.split("/")[-2] for path in fs.glob(f"{root.rstrip('/')}/*/config.json")]
    return sorted(filter(is_plain_name, found))


@final
class _Local:
    """A folder of a directory of runs: there is nothing to copy."""

    def __init__(self, path: Path):
        self.path, self.where = path, str(path)

    def has(self, name: str) -> bool:
        return (self.path / name).exists()

    def seen(self, *, weights: bool = True) -> Path:
        return self.path

    def fetch(self, name: str) -> Path:
        return self.path / name

    def grown(self, name: str) -> Path:
        return self.path / name

    def send(self, name: str) -> None: ...

    def merge(self) -> None: ...

    def held(
        self, *, field: str, doing: str, error: type[Exception], busy: type[Exception], note: Any
    ) -> AbstractContextManager[None]:
        return store.locked(self.path, field=field, doing=doing, error=error, busy=busy)

    def is_held(self) -> bool:
        return store.is_locked(self.path)

    @contextmanager
    def mirrored(self) -> Iterator[None]:
        yield

    def push(self) -> None: ...


@final
class _Mirrored:
    """A folder of a store at a URL."""

    def __init__(self, runs: str, name: str):
        self.where = f"{runs.rstrip('/')}/{name}"
        self.path = directory(runs) / name
        self._copy = directory(runs) / ".seen" / name
        self._holder = b""
        # Whether this machine may have what the store lacks: then the marker stays, and the next process of this folder
        # goes on with what is here.
        self._behind = False
        self._check: Callable[[], None] = lambda: None
        # A marker that is being written may read as nobody's.
        self._writing = threading.RLock()

    def has(self, name: str) -> bool:
        with _reached(self.where):
            fs, root = _open(self.where)
            return fs.exists(f"{root}/{name}")

    def seen(self, *, weights: bool = True) -> Path:
        heavy = () if weights else ("weights.safetensors", "kept/")
        self._pull(self._copy, lambda name: not name.startswith(heavy))
        return self._copy

    def fetch(self, name: str) -> Path:
        self._pull(self._copy, lambda other: other == name)
        return self._copy / name

    def grown(self, name: str) -> Path:
        here, there = self.path / name, self.fetch(name)
        if _size(there) > _size(here):
            store.write(here, there.read_bytes())
        return here

    def send(self, name: str) -> None:
        with _reached(self.where):
            fs, root = _open(self.where)
            _put(fs, self.path / name, f"{root}/{name}")

    def merge(self) -> None:
        with _reached(self.where):
            fs, root = _open(self.where)
            here, there = _files(self.path), _copied(self._listing())
            for name in there.keys() - here.keys():
                _get(fs, f"{root}/{name}", self.path / name)
            for name in here.keys() - there.keys():
                _put(fs, self.path / name, f"{root}/{name}")

    # Copies.

    def _listing(self) -> dict[str, str]:
        """Every file that the store has of the folder, and what tells whether it is still the same."""
        fs, root = _open(self.where)
        return {
            path.removeprefix(f"{root}/"): hashlib.sha256(repr(sorted(about.items())).encode()).hexdigest()
            for path, about in fs.find(root, detail=True).items()
            if path.startswith(f"{root}/")
        }

    def _pull(self, into: Path, wanted: Callable[[str], bool]) -> None:
        with _reached(self.where):
            fs, root = _open(self.where)
            there, before = _copied(self._listing()), _read_record(into)
            record = {name: before[name] for name in before if name in there}
            for name in filter(wanted, there):
                if record.get(name) != [there[name], _signature(into / name)]:
                    _get(fs, f"{root}/{name}", into / name)
                    record[name] = [there[name], _signature(into / name)]
            for name in _files(into).keys() - there.keys():
                (into / name).unlink(missing_ok=True)
            if record != before:
                store.write_json(into / RECORD, record)

    def push(self) -> None:
        self._check()
        with _reached(self.where):
            fs, root = _open(self.where)
            here, there, record = _files(self.path), self._listing(), _read_record(self.path)
            for torn in [name for name in there if name.endswith(".tmp")]:  # of a process that was killed
                fs.rm_file(f"{root}/{torn}")
            there = _copied(there)
            gone = sorted(there.keys() - here.keys(), key=_order, reverse=True)
            if "result.json" in gone:  # nobody is to take the rest for finished
                fs.rm_file(f"{root}/result.json")
                gone.remove("result.json")
            sent = []
            for name in sorted(here, key=_order):
                if record.get(name) == [there.get(name), here[name]]:
                    continue
                # The same file under another name, as a checkpoint becomes the one before it.
                twins = [other for other in record if record[other] == [there.get(other), here[name]]]
                _put(fs, self.path / name, f"{root}/{name}", f"{root}/{twins[0]}" if twins else None)
                sent.append(name)
                # Until it is known what the store calls the new one.
                there.pop(name, None)
            for name in gone:
                fs.rm_file(f"{root}/{name}")
            if sent:
                now = self._listing()
                record |= {name: [now[name], here[name]] for name in sent if name in now}
            store.write_json(self.path / RECORD, {name: record[name] for name in record if name in here})

    @contextmanager
    def mirrored(self) -> Iterator[None]:
        # If the last to hold it was a process of this folder, nobody has anything newer.
        if _read(self.path / HOLDER) != self._holder:
            (self.path / HOLDER).unlink(missing_ok=True)
            self._pull(self.path, lambda name: True)
            self._behind = True
            store.write(self.path / HOLDER, self._holder)
        try:
            yield
        except BaseException:
            with suppress(StoreError):  # what it was that ended this is to be told
                self.push()
                self._behind = False
            raise
        self.push()
        self._behind = False

    # Holding.

    @contextmanager
    def held(
        self,
        *,
        field: str,
        doing: str,
        error: type[Exception],
        busy: type[Exception],
        note: Callable[[str], None],
    ) -> Iterator[None]:
        taken = busy(f"{self.where} is being {doing} by another process.")
        with store.locked(self.path, field=field, doing=doing, error=error, busy=busy):
            self._take(taken, note)

            def check() -> None:
                if not self._is_ours():
                    raise taken

            self._check = check
            over = threading.Event()
            beats = threading.Thread(target=self._beat, args=(over,), daemon=True)
            beats.start()
            try:
                yield
            finally:
                over.set()
                beats.join()
                if not self._behind:
                    self._release()

    def is_held(self) -> bool:
        if store.is_locked(self.path):
            return True
        with _reached(self.where):
            return (marker := self._marker()) is not None and self._changes(marker, 2 * SECONDS_BETWEEN_BEATS)

    def _marker(self) -> bytes | None:
        fs, root = _open(self.where)
        try:
            return fs.cat_file(f"{root}/{MARKER}")
        except FileNotFoundError:
            return None

    def _changes(self, marker: bytes, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(SECONDS_BETWEEN_BEATS / 4)
            if (now := self._marker()) != marker:
                return now is not None
        return False

    def _is_ours(self) -> bool:
        with self._writing, _reached(self.where):
            return bool(self._holder) and (self._marker() or b"").startswith(self._holder)

    def _take(self, taken: Exception, note: Callable[[str], None]) -> None:
        last = _read(self.path / HOLDER)
        with _reached(self.where):
            fs, root = _open(self.where)
            fs.makedirs(root, exist_ok=True)
            found = self._marker()
            if found is not None and last and found.startswith(last):
                # A process of this folder, which has ended: it had the lock that this one has now.
                self._holder, self._behind = last, True
                return
            self._holder = uuid.uuid4().hex.encode()
            lives = False
            if found is not None:
                note(f"{self.where} is held: looking whether by a process that lives.")
                lives = self._changes(found, SECONDS_WITHOUT_A_BEAT)
            if not lives:
                with suppress(FileNotFoundError):
                    fs.rm_file(f"{root}/{MARKER}")
                with suppress(FileExistsError):
                    fs.pipe_file(f"{root}/{MARKER}", self._holder + b" 0", mode="create")
        if not self._is_ours():
            raise taken

    def _beat(self, over: threading.Event) -> None:
        beats = 0
        while not over.wait(SECONDS_BETWEEN_BEATS):
            beats += 1
            # A store that cannot be reached now may be so by the next beat.
            with suppress(StoreError), self._writing, _reached(self.where):
                if not self._is_ours():
                    return
                fs, root = _open(self.where)
                fs.pipe_file(f"{root}/{MARKER}", self._holder + b" %d" % beats)

    def _release(self) -> None:
        # Should the store be out of reach, the marker no longer changes.
        with suppress(StoreError), _reached(self.where):
            if self._is_ours():
                fs, root = _open(self.where)
                fs.rm_file(f"{root}/{MARKER}")


def _open(url: str) -> tuple[Any, str]:
    """The file system of a URL, for this thread, and the path in it."""
    try:
        import fsspec
    except ImportError as error:
        raise ValueError(f"runs: {url} needs `pip install mesascope[remote]`.") from error
    try:
        fs, root = fsspec.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise ValueError(f"runs: cannot open {url}: {error}") from error
    fs.invalidate_cache()  # of listings: others write too
    return fs, root


@contextmanager
def _reached(url: str) -> Iterator[None]:
    """Back ends have errors of many kinds."""
    try:
        yield
    except (ValueError, StoreError):
        raise
    except Exception as error:
        told = str(error)[:500] or type(error).__name__
        raise StoreError(f"could not read or write {url}: {told}. The same command goes on.") from error


def _put(fs: Any, source: Path, target: str, twin: str | None = None) -> None:
    """A file of this machine, under another name first: whoever looks sees the old target or the new one. If the store
    has the same file as `twin`, and can copy, nothing is sent."""
    folder, _, name = target.rpartition("/")
    fs.makedirs(folder, exist_ok=True)
    part = f"{folder}/.{name}.{uuid.uuid4().hex}.tmp"
    if twin is None or not _copy(fs, twin, part):
        fs.put_file(str(source), part)
    fs.mv(part, target)


def _copy(fs: Any, source: str, target: str) -> bool:
    """Within the store, if it can do that; sftp, ftp and smb cannot."""
    try:
        fs.cp_file(source, target)
    except NotImplementedError:
        return False
    return True


def _get(fs: Any, source: str, target: Path) -> None:
    """The same the other way. What has gone meanwhile goes here too."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        fs.get_file(source, str(part))
        os.replace(part, target)
    except FileNotFoundError:
        target.unlink(missing_ok=True)
    finally:
        part.unlink(missing_ok=True)


def _copied(found: dict[str, Any]) -> dict[str, Any]:
    """Without what is for one machine only, or has a name that could lead elsewhere."""
    return {name: about for name, about in found.items() if all(map(is_plain_name, name.split("/")))}


def _order(name: str) -> tuple[int, str]:
    return (LAST.index(name) if name in LAST else -1), name


def _files(folder: Path) -> dict[str, list[int]]:
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: _signature(path) for name, path in _copied(found).items()}


def _signature(path: Path) -> list[int]:
    """Tells whether a file of this machine has been replaced or written to."""
    try:
        about = path.stat()
    except FileNotFoundError:
        return []
    return [about.st_ino, about.st_mtime_ns, about.st_size]


def _read_record(folder: Path) -> dict[str, list[Any]]:
    """What the store called each file, and its signature here, when both were the same."""
    try:
        return checked(read_json(folder / RECORD), {str: [object]}, folder)
    except StoreError:  # none yet, or damaged: everything is copied again
        return {}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1
