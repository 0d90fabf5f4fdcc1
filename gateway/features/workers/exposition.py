"""Metrics of several workers as one page: every sample gets the label `worker`. Pure."""

import re
from collections.abc import Mapping
from typing import Final

_SAMPLE: Final = re.compile(rb"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{)?")
_END: Final = b"# EOF"  # of OpenMetrics


def merged(own: bytes, pages: Mapping[int, bytes]) -> bytes:
    """The pages of workers, by their numbers, as one, after the page of their parent. Families keep their order."""
    families: dict[bytes, tuple[list[bytes], list[bytes]]] = {}
    is_open_metrics = False
    for label, page in [(b"", own), *[(b'worker="%d"' % number, page) for number, page in pages.items()]]:
        described, samples = list[bytes](), list[bytes]()
        for line in page.splitlines():
            if line == _END:
                is_open_metrics = True
            elif line.startswith(b"#"):
                described, samples = families.setdefault(_family(line), ([], []))
                if line not in described:
                    described.append(line)
            elif line:
                samples.append(_labelled(line, label) if label else line)
    lines = [line for described, samples in families.values() for line in (*described, *samples)]
    return b"".join(line + b"\n" for line in (*lines, *([_END] if is_open_metrics else ())))


def _family(line: bytes) -> bytes:
    """The family that a line with `# HELP`, `# TYPE` or `# UNIT` is about."""
    words = line.split(b" ", 3)
    return words[2] if len(words) > 2 else line


def _labelled(line: bytes, label: bytes) -> bytes:
    found = _SAMPLE.match(line)
    if found is None:
        return line
    name, brace = found.groups()
    rest = line[found.end() :]
    if brace is None:
        return b"%b{%b}%b" % (name, label, rest)
    return b"%b{%b%b%b" % (name, label, b"" if rest.startswith(b"}") else b",", rest)
