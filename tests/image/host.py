"""What the image's build takes over from this machine: where its packages come from. All of it parsing."""

import ast
from collections.abc import Mapping
from pathlib import Path

ENVIRONMENT = ":env:"
SECTIONS = ("global", "download", "wheel", "install", ENVIRONMENT)  # a later one wins
LOCAL_ONLY = ("user", "target", "prefix", "root", "require-virtualenv", "no-index")


class UnknownHost(Exception):
    """This machine does not say what is needed; the message says what."""


def release_of(os_release: str) -> str:
    """The distribution's code name, such as bookworm, out of /etc/os-release."""
    fields = dict(line.split("=", 1) for line in os_release.splitlines() if "=" in line)
    if name := fields.get("VERSION_CODENAME", "").strip("\"'"):
        return name
    raise UnknownHost("/etc/os-release has no VERSION_CODENAME")


def apt_sources(folder: Path, release: str) -> list[Path]:
    """The source files of apt that serve a release."""
    files = [folder / "sources.list", *sorted((folder / "sources.list.d").glob("*"))]
    readable = [file for file in files if file.suffix in (".list", ".sources") and file.is_file()]
    if found := [file for file in readable if release in _words(file.read_text())]:
        return found
    raise UnknownHost(f"no source of {release} in {folder}")


def _words(text: str) -> set[str]:
    return {word for line in text.splitlines() for word in line.partition("#")[0].split()}


def apt_options(dump: str) -> list[str]:
    """Proxies and certificates that are set, out of `apt-config dump`."""
    lines = [line.strip() for line in dump.splitlines()]
    return [line for line in lines if line.startswith(("Acquire::http:", "Acquire::https:")) and '""' not in line]


def pip_settings(listing: str) -> dict[str, str]:
    """What is set here, out of `pip config list`."""
    found: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in found and key not in LOCAL_ONLY:
            found[section][key] = str(ast.literal_eval(value))
    return {key: value for section in SECTIONS for key, value in found[section].items()}


def pip_conf(settings: Mapping[str, str]) -> str:
    """The same as a configuration file."""
    return "\n".join(["[global]", *(f"{key} = {' '.join(value.split())}" for key, value in settings.items()), ""])


def local_paths(settings: Mapping[str, str]) -> list[Path]:
    """Files and folders of this machine that pip's settings name."""
    paths = set()
    for key, value in settings.items():
        for word in value.split():
            path = Path(word.removeprefix("file://"))
            if path.is_absolute() and path.exists():
                # an index's pages link to files beside the index
                paths.add(path.parent if key.endswith("index-url") and path.parent != Path("/") else path)
    return sorted(paths)
