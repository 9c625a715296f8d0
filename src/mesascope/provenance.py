"""What a run, or a result, is made with: source, libraries, device, command."""

import hashlib
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from mesascope import __version__
from mesascope.language.training import LanguageConfig
from mesascope.training import Config

PACKAGE = Path(__file__).parent
# What a run's numbers depend on.
SOURCES = (
    "ops", "tasks", "typing.py", "parts.py", "architecture.py", "taps.py", "models.py", "training.py",
    "language/model.py", "language/training.py",
)  # fmt: skip
# And what the numbers of a figure do.
OF_FIGURES = (*SOURCES, "theory", "analysis", "experiments")


def of(config: Config | LanguageConfig, devices: int) -> dict[str, Any]:
    """What a run is being made with, on so many devices: a sum over several is rounded otherwise than over one."""
    if isinstance(config, LanguageConfig):
        precision = f"{config.model.compute} on {devices} devices"
    else:
        tf32 = config.model.tf32 and jax.default_backend() == "gpu"
        precision = "tf32 projections" if tf32 else "float32"
        precision += f" on {devices} devices" if devices > 1 else ""
    return made_with() | {"precision": precision, "command": [_without_password(word) for word in sys.argv]}


def _without_password(word: str) -> str:
    return re.sub(r"://[^/\s]*@", "://", word)


def made_with() -> dict[str, Any]:
    """This program, its libraries and this machine's device."""
    libraries = ("jax", "jaxlib", "equinox", "optax", "numpy", "safetensors")
    device = jax.devices()[0]
    return {
        "mesascope": __version__,
        "source": source_hash(),
        "git": git_commit(),
        "python": sys.version.split()[0],
        "libraries": {name: importlib.metadata.version(name) for name in libraries},
        "device": f"{device.device_kind} ({device.platform})",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def source_hash(sources: Sequence[str] = SOURCES) -> str:
    """Of the source that a run's numbers, or others, depend on."""
    total = hashlib.sha256()
    for name in sources:
        path = PACKAGE / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            total.update(f"{file.relative_to(PACKAGE)}\n".encode())
            total.update(file.read_bytes())
    return total.hexdigest()[:16]


def git_commit() -> str | None:
    """Of the checkout that the package lies in, `+` if it has been changed; None outside of one."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(PACKAGE), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        inside = git("ls-files", "--error-unmatch", "provenance.py")
        return (
            git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")
            if inside
            else None
        )
    except (OSError, subprocess.CalledProcessError):
        return None
